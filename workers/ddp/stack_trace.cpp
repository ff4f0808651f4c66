#include "ddp/stack_trace.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "ddp/signal_text.h"

namespace ddp {
namespace {

constexpr int kMaxFrames = 64;

std::string readable(const char* mangled) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
    return status == 0 ? name.get() : mangled;
}

/// Where the object that holds `frame` was loaded; 0 when nobody knows.
std::uintptr_t base_of(const Dl_info& info) { return reinterpret_cast<std::uintptr_t>(info.dli_fbase); }

}  // namespace

std::string stack_trace(int skip) {
    void* frames[kMaxFrames];
    const int count = ::backtrace(frames, kMaxFrames);
    std::string text;
    for (int i = 1 + skip; i < count; ++i) {
        const auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
        Dl_info info{};
        const bool known = ::dladdr(frames[i], &info) != 0;
        const char* symbol = known && info.dli_sname != nullptr ? info.dli_sname : nullptr;
        text += fmt::format("#{} {} [{}+{:#x}]\n", i - 1 - skip, symbol != nullptr ? readable(symbol) : "??",
                            known ? info.dli_fname : "?", address - base_of(info));
    }
    return text;
}

std::size_t raw_stack_trace(char* text, std::size_t size) {
    void* frames[kMaxFrames];
    const int count = ::backtrace(frames, kMaxFrames);
    SignalText out(text, size);
    for (int i = 1; i < count; ++i) {
        const auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
        Dl_info info{};
        const bool known = ::dladdr(frames[i], &info) != 0;
        out.add("#").add_number(static_cast<std::uint64_t>(i - 1)).add(" ");
        out.add(known && info.dli_sname != nullptr ? info.dli_sname : "??").add(" [");
        out.add(known ? info.dli_fname : "?").add("+0x").add_hex(address - base_of(info)).add("]\n");
    }
    return out.size();
}

void prepare_stack_trace() {
    void* frames[2];
    ::backtrace(frames, 2);
}

}  // namespace ddp
