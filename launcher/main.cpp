#include "launcher/launch.h"

int main(int argc, char** argv) {
    // Before anything else: a Ctrl-C from here on is heard by the event loop, not by a default handler.
    ddprun::block_handled_signals();
    return ddprun::launch({argv + 1, argv + argc});
}
