#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace ddprun {
struct TraceRecord;
}

namespace ddp {

namespace trace {
struct Ring;
/// Where this process writes its trace; null: it writes none.
extern constinit std::atomic<Ring*> ring;

/// A span that has begun.
struct Begun {
    ddprun::TraceRecord* record = nullptr;
    std::uint64_t number = 0;
};
Begun begin_span(std::string_view name) noexcept;
void end(const Begun& begun) noexcept;
}  // namespace trace

/// A part of the program in the job's trace (docs/trace.md), from construction to destruction:
///
///     const ddp::Span span("forward");
///
/// Written once this process has made its first group, and only where there is a trace (ddprun --trace);
/// without one a Span costs one branch. The name is copied, its first 47 bytes. Any thread; spans of one
/// thread end in reverse order.
class Span {
  public:
    [[nodiscard]] explicit Span(std::string_view name) noexcept {
        if (trace::ring.load(std::memory_order_relaxed) != nullptr) begun_ = trace::begin_span(name);
    }
    ~Span() {
        if (begun_.record != nullptr) trace::end(begun_);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

  private:
    trace::Begun begun_;
};

}  // namespace ddp
