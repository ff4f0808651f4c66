#pragma once

#include <string>
#include <vector>

namespace ddprun::test {

/// Passes each frame that comes in at a port on to all others, after a delay of its own between 5 and 80 ms:
/// what was sent later may arrive first. For kernels without netem. Runs until it is killed, in the network
/// namespace of the ports; the exit code when it cannot.
int be_slow_switch(const std::vector<std::string>& ports);

}  // namespace ddprun::test
