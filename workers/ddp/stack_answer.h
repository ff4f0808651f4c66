#pragma once

#include <cstdint>
#include <memory>

#include "ddp/segment_map.h"

namespace ddp {

/// From now on the launcher can ask this process for its stacks: a thread that gets SIGRTMIN+5 sends its stack
/// through the lifeline (the inherited descriptor), and goes on. The rank's line in the segment says so. Kept for the life of the process; a
/// second call does nothing, nor does one where the program handles that signal itself.
void answer_stack_requests(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd);

}  // namespace ddp
