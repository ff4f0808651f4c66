#include "agreement.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace train {
namespace {

/// The first byte is the code, the rest the message.
std::string message_of(const std::optional<StartupError>& error) {
    return error ? static_cast<char>(error->code) + error->what
                 : std::string(1, static_cast<char>(ExitCode::Ok));
}

ExitCode code_of(const std::string& message) { return static_cast<ExitCode>(message.at(0)); }

/// The result is equal on all ranks, because every rank has both sides.
std::optional<AgreedError> compare(ddp::ProcessGroup& group, std::span<const ddp::NamedValue> values,
                                   ExitCode code) {
    try {
        ddp::verify_equal(group, values);
    } catch (const ddp::MismatchError& error) {
        return AgreedError{{code, error.what()}, 0};
    }
    return std::nullopt;
}

}  // namespace

std::optional<AgreedError> agree(ddp::ProcessGroup& group, const std::optional<StartupError>& mine,
                                 const CommonSettings& common) {
    const std::vector<std::string> all = group.all_gather_bytes(message_of(mine));
    const auto failed =
        std::find_if(all.begin(), all.end(), [](const auto& m) { return code_of(m) != ExitCode::Ok; });
    if (failed == all.end()) {
        if (auto differs = compare(group, common.settings, ExitCode::Usage)) return differs;
        return compare(group, {&common.data, 1}, ExitCode::DataError);
    }
    const bool all_equal = std::all_of(all.begin(), all.end(), [&](const auto& m) { return m == all[0]; });
    const auto rank = static_cast<int>(failed - all.begin());
    const std::string what = failed->substr(1);
    return AgreedError{{code_of(*failed), all_equal ? what : fmt::format("rank {}: {}", rank, what)}, rank};
}

}  // namespace train
