// A worker of libddp that gets into trouble on rank 1, for the system tests:
//   lag      makes 3 collectives, then rank 1 sleeps for ever while the others go on to the fourth
//   throw    rank 1 throws in a named function       segv     rank 1 crashes
#include <unistd.h>

#include <array>
#include <csignal>
#include <stdexcept>
#include <string_view>

#include "ddp/error_report.h"
#include "ddp/process_group.h"

namespace probe {

[[gnu::noinline, gnu::visibility("default")]] int throw_in_a_named_function();
int throw_in_a_named_function() { throw std::runtime_error("the disk of the moon is full"); }

}  // namespace probe

namespace {

[[noreturn]] void wait_for_signals() {
    for (;;) ::pause();
}

int run(std::string_view act) {
    const ddp::Context context = ddp::Context::from_env();
    const auto group = ddp::ProcessGroup::create(context);
    std::array<float, 4> values = {};
    for (int i = 0; i < 3; ++i) group->all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    if (group->rank() == 1) {
        if (act == "throw") return probe::throw_in_a_named_function();
        if (act == "segv") return ::raise(SIGSEGV);
        wait_for_signals();
    }
    group->all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return ddp::run_main("probe", [&] { return run(argc > 1 ? argv[1] : "lag"); });
}
