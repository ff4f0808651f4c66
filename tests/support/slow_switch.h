#pragma once

#include <string>
#include <vector>

namespace ddprun::test {

/// Passes each frame of a port on to all others after its own delay of 5 to 80 ms, so that later frames may
/// arrive first. It is for kernels without netem. Runs until it is killed, in the network namespace of the
/// ports; returns an exit code if it cannot.
int be_slow_switch(const std::vector<std::string>& ports);

}  // namespace ddprun::test
