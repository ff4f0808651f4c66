#include "launcher/launch.h"
#include "launcher/signals.h"

int main(int argc, char** argv) {
    // Before anything else: a Ctrl-C from here on is heard by the event loop, not by a default handler.
    ddprun::block_handled_signals();
    ddprun::open_standard_streams();
    return ddprun::launch({argv + 1, argv + argc});
}
