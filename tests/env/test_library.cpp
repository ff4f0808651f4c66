#include "env/io/library.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <optional>

namespace ddprun {
namespace {

void foreign_handler(int) {}

auto handler_of(int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler;
}

TEST(KeptSignals, RestoresHandlersThatALibraryReplaced) {
    ASSERT_EQ(handler_of(SIGUSR2), SIG_DFL);
    {
        const KeptSignals kept;
        ::signal(SIGUSR2, foreign_handler);
    }
    EXPECT_EQ(handler_of(SIGUSR2), SIG_DFL);
}

TEST(KeptSignals, RestoresWhenTheLastOfSeveralThreadsEnds) {
    std::optional<KeptSignals> first(std::in_place);
    ::signal(SIGUSR2, foreign_handler);
    std::optional<KeptSignals> second(std::in_place);
    first.reset();
    EXPECT_EQ(handler_of(SIGUSR2), foreign_handler);
    second.reset();
    EXPECT_EQ(handler_of(SIGUSR2), SIG_DFL);
}

TEST(LoadLibrary, ReturnsNullForAMissingFile) { EXPECT_EQ(load_library("libno-such-library.so.1"), nullptr); }

}  // namespace
}  // namespace ddprun
