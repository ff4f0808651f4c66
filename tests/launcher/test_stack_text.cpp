#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/hang/stacks.h"
#include "launcher/talk/control.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RankStack stack(int rank, StackMethod method, std::string text) {
    return {rank, 100 + rank, method, std::move(text), ""};
}

TEST(StackText, RanksWithEqualStacksAreShownOnce) {
    const std::string text = render_stacks(
        {stack(
             0, StackMethod::Gdb,
             "Thread 1 (Thread 0x7f01 (LWP 100)):\n#0  wait () at w.c:3\n#1  0x01 in step (rank=0) at a.c:7\n"),
         stack(
             1, StackMethod::Gdb,
             "Thread 1 (Thread 0x7f02 (LWP 101)):\n#0  wait () at w.c:3\n#1  0x02 in step (rank=1) at a.c:8\n"),
         stack(
             2, StackMethod::Gdb,
             "Thread 1 (Thread 0x7f03 (LWP 102)):\n#0  wait () at w.c:3\n#1  0x03 in step (rank=2) at a.c:7\n"),
         stack(
             3, StackMethod::Gdb,
             "Thread 1 (Thread 0x7f04 (LWP 103)):\n#0  wait () at w.c:3\n#1  0x04 in step (rank=3) at a.c:7\n")});
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 (pid 100), by gdb; ranks 2-3 stand alike:\n    Thread 1 "),
                            HasSubstr("rank 1 (pid 101), by gdb:\n"), HasSubstr("step (rank=1) at a.c:8"),
                            Not(HasSubstr("rank=2"))))
        << text;
}

TEST(StackText, HandlersDifferByFunctionNotByAddress) {
    const std::string text = render_stacks(
        {stack(0, StackMethod::Handler, "thread 7\n#0 pause [libc.so+0x12]\n#1 run(int) [t+0x1]\n"),
         stack(1, StackMethod::Handler, "thread 8\n#0 pause [libc.so+0x12]\n#1 run(int) [t+0x2]\n"),
         stack(2, StackMethod::Handler, "thread 9\n#0 pause [libc.so+0x12]\n#1 load(int) [t+0x1]\n")});
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 (pid 100), by its own handler; rank 1 stands alike:"),
                            HasSubstr("rank 2 (pid 102)")));
}

TEST(StackText, StacksDifferByPythonLines) {
    const std::string text = render_stacks(
        {stack(0, StackMethod::PySpy, "Process 7: python a\nThread 7 (idle)\n    step (w.py:4)\n"),
         stack(1, StackMethod::PySpy, "Process 8: python a\nThread 8 (idle)\n    step (w.py:5)\n"),
         stack(2, StackMethod::PySpy, "Process 9: python a\nThread 9 (active)\n    step (w.py:5)\n")});
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 (pid 100), by py-spy:"),
                            HasSubstr("rank 1 (pid 101), by py-spy; rank 2 stands alike:")));
}

// A sleeping thread can still be on the scheduler's queue, and then the kernel does not say where it waits.
TEST(StackText, AThreadWhosePlaceTheKernelHidesStandsAsTheOthersInItsSystemCall) {
    const std::string text = render_stacks(
        {stack(0, StackMethod::Kernel, "state S (sleeping), waits in __do_sys_pause, system call 34"),
         stack(1, StackMethod::Kernel, "state S (sleeping), system call 34"),
         stack(2, StackMethod::Kernel, "state S (sleeping), system call 35")});
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 (pid 100), by the kernel; rank 1 stands alike:"),
                            HasSubstr("rank 2 (pid 102)")));
}

TEST(StackText, GdbsOwnMessagesAreLeftOut) {
    const std::string text = render_stacks({stack(
        0, StackMethod::Gdb,
        "29\t../pause.c: No such file or directory.\n\nThread 1 (x):\n#0  pause ()\n[Inferior 1 (process 7) detached]\n")});
    EXPECT_EQ(text, "rank 0 (pid 100), by gdb:\n    Thread 1 (x):\n    #0  pause ()\n");
}

TEST(StackText, IsDecodedAsItWasSent) {
    std::vector<RankStack> stacks = {stack(3, StackMethod::EuStack, "#0 \"x\"\n"),
                                     stack(4, StackMethod::Kernel, "")};
    stacks[0].host = "node01";
    const auto read = [](std::string_view line) {
        return answer_from<std::vector<RankStack>>(line, "stacks");
    };
    EXPECT_EQ(read(answer_of("stacks", stacks)).value_or(std::vector<RankStack>{}), stacks);
    EXPECT_EQ(read(R"({"ok":false,"error":"none runs"})").error().what, "none runs");
    for (const char* line : {"", "[]", "{}", R"({"stacks":[3]})"}) EXPECT_FALSE(read(line)) << line;
    EXPECT_FALSE(read("no json"));
}

}  // namespace
}  // namespace ddprun::test
