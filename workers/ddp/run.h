#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "ddp/context.h"
#include "ddp/lifeline.h"
#include "ddp/process_group.h"

namespace ddp {

/// This process's place among the ranks, with the objects that most programs make once. For one thread.
class World {
  public:
    /// `options` are those of the group.
    explicit World(Context context, ProcessGroupOptions options = {});
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    [[nodiscard]] const Context& context() const { return context_; }
    [[nodiscard]] int rank() const { return context_.rank(); }
    [[nodiscard]] int size() const { return context_.world_size(); }
    /// The group of all ranks. The first call makes it, on all ranks together: see ProcessGroup::create for
    /// its errors. Inside Epochs::run the group of the generation.
    [[nodiscard]] ProcessGroup& group();
    // NOLINTNEXTLINE(google-explicit-constructor): a world stands wherever its group is expected.
    operator ProcessGroup&() { return group(); }
    /// The first call makes it: from then on SIGTERM and SIGINT are requests to stop, which the program asks
    /// for (Epochs does).
    [[nodiscard]] Lifeline& lifeline();

    /// True when Epochs has stopped before its end, because a signal or the launcher asked for it.
    [[nodiscard]] bool stopped_early() const { return stopped_early_; }

  private:
    friend class Epochs;
    Context context_;
    const ProcessGroupOptions options_;
    std::unique_ptr<Lifeline> lifeline_;
    bool stopped_early_ = false;  ///< by Epochs
    std::unique_ptr<ProcessGroup> own_group_;
    ProcessGroup* group_ = nullptr;  ///< the own one, or that of a generation
};

/// The main function of a worker: calls `body` with this process's world, and returns its value (0 for a body
/// without one), or kStoppedEarly instead of 0 where Epochs has stopped early. An exception or a crash ends
/// the process as run_main says, with an error report for the launcher. Without a launcher the world has one
/// rank. Call it once, from main.
///
///     int main() {
///         return ddp::run([](ddp::World& world) {
///             std::vector<float> values(1000, static_cast<float>(world.rank()));
///             world.group().all_reduce(ddp::buffer_of(std::span(values))).wait();
///         });
///     }
[[nodiscard]] int run(const std::function<int(World&)>& body, ProcessGroupOptions options = {});
template <class Body>
requires std::is_void_v<std::invoke_result_t<Body&, World&>>
[[nodiscard]] int run(Body body, ProcessGroupOptions options = {}) {
    return run(std::function<int(World&)>([&body](World& world) {
                   body(world);
                   return 0;
               }),
               std::move(options));
}

}  // namespace ddp
