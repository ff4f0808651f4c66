#include "tests/support/fake_nccl/fake_trace.h"

#include <cstdlib>

#include "tests/support/trace_log.h"

namespace fake {

namespace {

using ddprun::test::TraceLog;

/// Null without FAKE_CUDA_TRACE.
TraceLog* trace() {
    static TraceLog* const log = [] {
        const char* const file = std::getenv("FAKE_CUDA_TRACE");
        return file != nullptr && *file != '\0' ? new TraceLog(file) : nullptr;
    }();
    return log;
}

}  // namespace

TracedCall::TracedCall(std::string_view function, std::string_view kernel)
    : function_(function), kernel_(kernel) {
    if (trace() != nullptr) start_ = TraceLog::now();
}

TracedCall::~TracedCall() {
    if (trace() != nullptr) trace()->add(0, start_, function_, kernel_);
}

}  // namespace fake
