#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "env/scalar.h"

namespace ddprun {
class CurveFile;
}

namespace ddp {

using ddprun::Scalar;

/// Writes curves of a run (loss, learning rate) that TensorBoard shows: `tensorboard --logdir DIR`.
///
///     std::optional<ddp::Scalars> scalars;
///     if (group->rank() == 0) scalars.emplace("runs/first");
///     while (...) {
///         step();
///         if (scalars) scalars->add(steps, {{"train/loss", loss}, {"train/rate", rate}});
///     }
///     if (scalars && !scalars->failure().empty()) std::fprintf(stderr, "%s\n", scalars->failure().c_str());
///
/// One directory is one run, with one writer at a time. After a restart the resumed program makes a Scalars
/// for the same directory: it writes a new file, and TensorBoard drops the earlier points of the steps that
/// are done again, because the first step added tells where the run goes on. For one thread at a time.
class Scalars {
  public:
    /// Creates the directory where it is missing, and an event file in it. Throws FileError.
    explicit Scalars(const std::string& directory);
    /// Writes what waits.
    ~Scalars();
    Scalars(Scalars&&) noexcept;
    Scalars& operator=(Scalars&&) noexcept;

    /// Adds a point at `step` to each named curve. Points wait in memory until one of them is a second old at
    /// the next add, or 64 KiB wait; then this call writes them, and blocks as the file system does (as flush
    /// and the destructor do). What was written survives kill -9, not a power cut. Never throws FileError:
    /// points that cannot be written are lost, and the first cause is kept as failure().
    void add(std::uint64_t step, std::span<const Scalar> scalars);
    void add(std::uint64_t step, std::initializer_list<Scalar> scalars) {
        add(step, std::span(scalars.begin(), scalars.size()));
    }
    /// Writes what waits: before a long pause, or beside a checkpoint.
    void flush();
    /// The reason why points were first lost: "write runs/first/events...: No space left on device"; "" none
    /// were. The next points are tried again.
    [[nodiscard]] const std::string& failure() const { return failure_; }

  private:
    std::unique_ptr<ddprun::CurveFile> file_;
    std::string failure_;
};

}  // namespace ddp
