#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/hang/stacks.h"

/// Stacks of ranks as values that travel, and as text for people. Pure.
namespace ddprun {

/// Converts to one line of JSON with its newline, and back. Error: Protocol; Refused with the node's message.
std::string to_json(const std::vector<RankStack>& stacks);
Result<std::vector<RankStack>> stacks_from_json(std::string_view line);

/// One block for all ranks with equal stacks: the same functions and, where known, the same line numbers.
/// Addresses, arguments and process numbers do not count. The first rank's stack is shown for all.
///
///   rank 0 on node01 (pid 4171), by its own handler; ranks 1-3, 8-15 stand alike:
std::string render_stacks(const std::vector<RankStack>& stacks);

}  // namespace ddprun
