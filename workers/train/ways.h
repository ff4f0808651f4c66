#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <vector>

#include "products.h"
#include "tuner.h"
#include "tuning.h"

namespace train {

/// Something that can be done in several ways, and its shape.
struct Task {
    enum class What { Linear, LinearWithRelu, LinearGradients, InputGradient, InputGradientByMask } what;
    Product::Kind product;  ///< without an epilogue
    auto operator<=>(const Task&) const = default;
};

/// The ways of a task by number: what is in one pass comes first, a product and a kernel of our own last.
inline constexpr std::size_t kLinearWithMask = 0, kLinearFused = 1, kLinearPlain = 2, kLinearWays = 3;
inline constexpr std::size_t kGradientFused = 0, kGradientPlain = 1, kGradientWays = 2;

/// What each way of the tasks takes, as far as it is known.
class Ways {
  public:
    /// Without a tuner (borrowed) nothing becomes known.
    explicit Ways(Tuner* tuner) : tuner_(tuner) {}

    /// How long each way takes, which is measured if it is new and the tuner may: it waits then, and leaves
    /// the result of any way. Null: not known. Throws what `run` throws, ddp::Error.
    const std::vector<double>* times(const Task& task, std::size_t ways, const Tuner::Run& run);

    /// Tasks for which product and kernel are faster than an epilogue that there is.
    [[nodiscard]] std::size_t plain() const;
    [[nodiscard]] std::vector<Timing> timings() const;

    /// Goes the preferred way, or the first of the others that there is. False: there is none.
    [[nodiscard]] static bool go(std::size_t preferred, std::size_t ways, const Tuner::Run& run);

  private:
    Tuner* tuner_;
    std::map<Task, std::vector<double>> times_;
};

}  // namespace train
