#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ddp/context.h"
#include "ddp/process_group.h"

namespace ddp {

class DistributedSampler;
class Lifeline;
struct Training;

// Of ddp/objects.h, which a program includes that keeps values by their JSON form.
namespace objects {
template <class T>
std::string encode(const T& object);
template <class T>
T decode(const std::string& call, std::size_t rank, const std::string& message);
}  // namespace objects

/// The state with which a generation begins, the same on all ranks but for `state`.
struct Start {
    enum class State : std::uint8_t {
        New,   ///< nothing was restored: load the checkpoint here, if there is one
        Own,   ///< this process kept its state
        Peers  ///< another rank gave it
    } state = State::New;
    std::uint64_t commits = 0;     ///< units that the state includes
    std::uint64_t generation = 0;  ///< of the world; it only grows
    bool world_changed = false;    ///< the world has another size than when the last body began

    [[nodiscard]] bool is_new() const { return state == State::New; }
};

/// Recovery in place: when a process of the world dies, ddprun starts it again, the other processes go on,
/// and no committed step is lost. On CPU backends the bits are those of an undisturbed run. docs/recovery.md
/// has the contract.
///
///     ddp::Recovery recovery(context);
///     recovery.keep({model, *optimizer, sampler});
///     recovery.run([&](ddp::ProcessGroup& group, const ddp::Start& start) {
///         model.attach(group, start.is_new());
///         while (sampler.epoch() < epochs) {
///             ... forward, backward, model.finish() ...
///             recovery.commit([&] { optimizer->step(); });
///         }
///     });
///
/// The work between two commits is a *unit*: a step, an evaluation, a checkpoint. After a failure the unit in
/// which it happened is repeated by all ranks, so it must be repeatable; what it prints or writes may come
/// twice. Each unit has a collective in which every rank waits for every rank (all_reduce, all_gather,
/// reduce_scatter, all_to_all, barrier).
///
/// Where the launcher cannot recover in place, run() calls the body once, all checks apply, and a failure is
/// thrown as without Recovery. One per process, for one thread.
class Recovery {
  public:
    enum class Kind : std::uint8_t {
        Committed,  ///< equal on all ranks, and changed only inside commit(); never copied
        Moving,     ///< equal on all ranks, and changed inside a unit, as a sampler that a Loader advances;
                    ///< copied at each commit, and restored before a repeat
        Own         ///< of this rank alone: an RNG, the sum of its losses; copied by prepare()
    };

    /// Tells the launcher whether this process can recover. `options` are those of each generation's group.
    /// `lifeline` is the program's, if it has one: its should_stop() follows the generations. Borrowed.
    /// Throws Error for a second Recovery.
    explicit Recovery(const Context& context, ProcessGroupOptions options = {}, Lifeline* lifeline = nullptr);
    ~Recovery();
    Recovery(const Recovery&) = delete;
    Recovery& operator=(const Recovery&) = delete;

    /// Names the state that a new process needs, the same on all ranks and in the same order. Before run();
    /// borrowed until it returns. Names are unique. The sampler of a Training is Moving, the rest Committed.
    void keep(const Training& training);
    void keep(std::string name, Stateful& object, Kind kind = Kind::Committed);
    /// Keeps the memory of tensors, for example the parameters that a DistributedDataParallel borrows.
    void keep(std::string name, std::vector<Tensor> tensors, Kind kind = Kind::Committed);
    /// Keeps the position of a sampler, which is Moving.
    void keep(std::string name, DistributedSampler& sampler);
    /// `T` is arithmetic, or another type without padding and pointers (the engines of <random>), or has a
    /// JSON form by ddp/objects.h.
    template <class T>
    void keep_value(std::string name, T& value, Kind kind = Kind::Committed) {
        constexpr bool is_bytes = std::is_arithmetic_v<T> || (std::is_trivially_copyable_v<T> &&
                                                              std::has_unique_object_representations_v<T>);
        if constexpr (is_bytes) {
            static_assert(!std::is_pointer_v<T>, "a pointer means nothing in another process");
            keep_bytes(std::move(name), &value, sizeof value, kind);
        } else {
            keep_text(
                std::move(name), [&value] { return objects::encode(value); },
                [&value](const std::string& text) { value = objects::decode<T>("keep_value", 0, text); },
                kind);
        }
    }

    /// Calls `body` with a new group in each generation, until it has returned on all ranks. Objects of a
    /// group (DistributedDataParallel, Loader, splits, Store) are made in the body, which takes its position
    /// from the kept values. PeerLostError and TimeoutError of the body begin the next generation; every
    /// other exception passes through, should end the process, and the process is replaced.
    void run(const std::function<void(ProcessGroup& group, const Start& start)>& body);

    /// Copies the Own values, final for this unit. Call it before the unit's last all-rank collective begins.
    /// Not needed without Own values.
    void prepare();
    /// Completes the unit. `change` updates Committed state (the optimizer, the schedule, counters), and
    /// calls no collective, unless what was made over the group refuses recovery (a sharded model, whose
    /// optimizer gathers the weights). Throws Error, before the change, when the unit had no all-rank
    /// collective, a collective is in flight or has failed, or prepare() is missing; after it, when an Own
    /// value is not as prepared.
    void commit(const std::function<void()>& change = {});
    /// The number of units committed since the state was New.
    [[nodiscard]] std::uint64_t commits() const;
    /// Why a failure restarts all ranks; "" where the lost rank alone is replaced.
    [[nodiscard]] const std::string& refusal() const;
    /// From now on a failure restarts all ranks. Call it before an exit that another process cannot mend.
    void refuse(const char* why);
    /// The current generation's, for a Store.
    [[nodiscard]] const Context& context() const;

  private:
    class Impl;
    void keep_bytes(std::string name, void* bytes, std::size_t size, Kind kind);
    void keep_text(std::string name, std::function<std::string()> read,
                   std::function<void(const std::string&)> write, Kind kind);

    std::unique_ptr<Impl> impl_;
};

/// A seed for the unit after `commits` units: an RNG that is made from it in every unit needs no keeping.
[[nodiscard]] std::uint64_t step_seed(std::uint64_t seed, int rank, std::uint64_t commits);

}  // namespace ddp
