#include "launcher/launch.h"
#include "launcher/spec/signals.h"

int main(int argc, char** argv) {
    // First of all: from here on the event loop, not a default handler, gets a Ctrl-C.
    ddprun::block_handled_signals();
    ddprun::open_standard_streams();
    return ddprun::launch({argv + 1, argv + argc});
}
