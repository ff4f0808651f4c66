#include "launcher/signal_names.h"

#include <signal.h>
#include <string.h>

#include <string>

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/report.h"

namespace ddprun {

std::optional<int> signal_from_name(std::string_view name) {
    if (const Result<std::int64_t> number = parse_int(name)) {
        if (*number < 1 || *number >= SIGRTMAX) return std::nullopt;
        return static_cast<int>(*number);
    }
    std::string word = lower(name);
    if (word.starts_with("sig")) word.erase(0, 3);
    for (int signal = 1; signal < SIGRTMIN; ++signal) {
        const char* abbreviation = ::sigabbrev_np(signal);
        if (abbreviation != nullptr && lower(abbreviation) == word) return signal;
    }
    return std::nullopt;
}

std::string signal_name(int signal) {
    const char* abbreviation = ::sigabbrev_np(signal);
    if (abbreviation == nullptr) return fmt::format("signal {}", signal);
    return fmt::format("SIG{}", abbreviation);
}

}  // namespace ddprun
