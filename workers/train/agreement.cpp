#include "agreement.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace train {
namespace {

/// First byte the code, the rest what the rank has to say: its trouble, or its fingerprint.
std::string message_of(const std::optional<Trouble>& trouble, std::uint64_t fingerprint) {
    const char code = static_cast<char>(trouble ? trouble->code : ExitCode::Ok);
    return code + (trouble ? trouble->what : fmt::format("{:016x}", fingerprint));
}

ExitCode code_of(const std::string& message) { return static_cast<ExitCode>(message.at(0)); }

}  // namespace

std::optional<AgreedTrouble> agree(ddp::ProcessGroup& group, const std::optional<Trouble>& mine,
                                   std::uint64_t fingerprint) {
    const std::vector<std::string> all = group.all_gather_bytes(message_of(mine, fingerprint));
    const bool all_equal = std::all_of(all.begin(), all.end(), [&](const auto& m) { return m == all[0]; });
    const auto failed =
        std::find_if(all.begin(), all.end(), [](const auto& m) { return code_of(m) != ExitCode::Ok; });
    if (failed != all.end()) {
        const auto rank = static_cast<int>(failed - all.begin());
        const std::string what = failed->substr(1);
        return AgreedTrouble{{code_of(*failed), all_equal ? what : fmt::format("rank {}: {}", rank, what)},
                             rank};
    }
    if (all_equal) return std::nullopt;
    const auto other = std::find_if(all.begin(), all.end(), [&](const auto& m) { return m != all[0]; });
    const auto rank = static_cast<int>(other - all.begin());
    return AgreedTrouble{
        {ExitCode::DataError, fmt::format("rank {}: its data file differs from rank 0's", rank)}, rank};
}

}  // namespace train
