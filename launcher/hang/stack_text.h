#pragma once

#include <string>
#include <vector>

#include "launcher/hang/stacks.h"

/// Stacks of ranks as values that travel, and as text for people. Pure.
namespace ddprun {

class Visitor;

void describe(Visitor& v, RankStack& stack);

/// One block for all ranks with equal stacks: the same functions and, where known, the same line numbers.
/// Addresses, arguments and process numbers do not count. The first rank's stack is shown for all.
///
///   rank 0 on node01 (pid 4171), by its own handler; ranks 1-3, 8-15 stand alike:
std::string render_stacks(const std::vector<RankStack>& stacks);

}  // namespace ddprun
