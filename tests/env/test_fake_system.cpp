#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "env/os/event_loop.h"
#include "tests/env/process_fixture.h"
#include "tests/support/fake_system.h"

namespace ddprun::os {
namespace {

using test::FailNth;
using test::FakeSystem;
using test::program;
using testing::ElementsAre;

TEST(FakeSystem, EndsChildrenOnRequestAndKeepsThemUntilReaped) {
    FakeSystem system;
    const pid_t a = *system.spawn(program("/a"));
    const pid_t b = *system.spawn(program("/b"));
    EXPECT_LT(a, b);
    EXPECT_EQ(system.next_exit(), std::nullopt);
    system.exit(b, 3);
    system.die_of(a, SIGSEGV, true);
    EXPECT_EQ(system.next_exit(), (ChildExit{b, false, 3, false}));
    system.reap(b);
    EXPECT_EQ(system.next_exit(), (ChildExit{a, true, SIGSEGV, true}));
    EXPECT_EQ(system.live_children(), 0);
    EXPECT_EQ(system.zombies(), 1);
    EXPECT_TRUE(system.group_exists(a));
    system.reap(a);
    EXPECT_FALSE(system.group_exists(a));
}

TEST(FakeSystem, DeliversSignalsAsTheKernelWould) {
    FakeSystem system;
    const pid_t stubborn = *system.spawn(program("/a"));
    const pid_t grandchild = system.add_grandchild(stubborn);
    system.ignore_signal(stubborn, SIGTERM);
    EXPECT_THAT(system.descendants(), ElementsAre(grandchild, stubborn));
    ASSERT_TRUE(system.signal_group(stubborn, SIGTERM));
    EXPECT_THAT(system.descendants(), ElementsAre(stubborn));
    ASSERT_TRUE(system.signal_group(stubborn, SIGCONT));
    EXPECT_EQ(system.live_children(), 1);
    ASSERT_TRUE(system.signal_process(stubborn, SIGKILL));
    EXPECT_EQ(system.live_children(), 0);
    const std::vector<FakeSystem::Signal> expected{
        {stubborn, SIGTERM, true}, {stubborn, SIGCONT, true}, {stubborn, SIGKILL, false}};
    EXPECT_EQ(system.signals(), expected);
}

TEST(FakeSystem, HoldsAChildsDescriptorsUntilItEnds) {
    FakeSystem system;
    Result<System::Pipe> pipe = system.make_pipe(65536);
    ASSERT_TRUE(pipe);
    SpawnSpec spec = program("/a");
    spec.descriptors = {{pipe->write.get(), 1}};
    const pid_t pid = *system.spawn(spec);
    pipe->write.reset();
    ASSERT_EQ(::write(system.descriptor(pid, 1), "hi", 2), 2);
    EXPECT_EQ(system.descriptor(pid, 2), -1);
    system.exit(pid, 0);
    EXPECT_EQ(test::read_to_end(pipe->read.get()), "hi");
    EXPECT_EQ(system.open_fds(), 1);
    pipe->read.reset();
    EXPECT_EQ(system.open_fds(), 0);
}

TEST(FakeSystem, FailsTheCallItWasToldTo) {
    FakeSystem system{FailNth{2}};
    EXPECT_TRUE(system.make_pipe(65536));
    EXPECT_EQ(system.spawn(program("/a")).error().what, "fork: Resource temporarily unavailable");
    EXPECT_TRUE(system.spawn(program("/a")));
    EXPECT_EQ(system.calls(), 3);
    system.fail_spawn(ENOENT);
    EXPECT_EQ(system.spawn(program("/a")).error().what, "exec /a: No such file or directory");
}

TEST(FakeSystem, ReportsAnEndToAnEventLoop) {
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create({SIGCHLD});
    ASSERT_TRUE(loop);
    FakeSystem system;
    const pid_t pid = *system.spawn(program("/a"));
    int told = 0;
    (*loop)->on_signal([&](const signalfd_siginfo&) { ++told; });
    system.exit(pid, 0);
    ASSERT_TRUE((*loop)->run_once(test::soon()));
    EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace ddprun::os
