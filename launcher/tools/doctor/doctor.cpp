#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/machine/gpu/gpu_facts.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/tools/doctor/collect.h"
#include "launcher/tools/doctor/judge.h"
#include "launcher/tools/doctor/render.h"
#include "launcher/tools/doctor/trial.h"

namespace ddprun {
namespace {

constexpr const char* kHelp =
    "usage: ddprun doctor [--json] [--no-run] [--seconds S] [--bytes SIZE]\n\n"
    "Looks at this machine as a place for training: driver, GPUs, NCCL's variables, network, memory, limits; "
    "runs a\n"
    "two-second all-reduce among its GPUs, or CPUs; says what is wrong and what to set.\n\n"
    "  --json        one JSON object instead of the table\n"
    "  --no-run      without the all-reduce\n"
    "  --seconds S   how long it lasts, up to 30; default 2\n"
    "  --bytes SIZE  how much each worker gives to it; default 256MiB of a GPU, else 64MiB\n\n"
    "Exit codes: 0 nothing is wrong (warnings included), 1 an error was found, 64 wrong usage.\n";

constexpr int kSomethingWrong = 1;

int count_visible(const doctor::Facts& facts) {
    return static_cast<int>(visible_gpus(physical_gpus(facts.nvidia), facts.visible_devices).size());
}

doctor::Facts collect(const DoctorOptions& options) {
    doctor::Facts facts;
    facts.host = doctor::collect_host();
    facts.nvidia = read_nvidia_facts(NvidiaDetail::AndTopology);
    facts.visible_devices = process_environment("CUDA_VISIBLE_DEVICES");
    facts.network = detect_network();
    facts.variables = doctor::collect_variables();
    if (!options.run) return facts;
    facts.trial =
        doctor::run_trial(doctor::plan_trial(facts.host, facts.nvidia, count_visible(facts), options.size));
    return facts;
}

doctor::TextStyle terminal_style() {
    doctor::TextStyle style;
    winsize size{};
    if (::isatty(STDOUT_FILENO) == 0) return style;
    style.color = process_environment("NO_COLOR").value_or("").empty();
    style.width = 100;
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60) style.width = size.ws_col;
    return style;
}

}  // namespace

int run_doctor(const DoctorOptions& options) {
    if (options.help) {
        ddprun::print("{}", kHelp);
        return 0;
    }
    const doctor::Facts facts = collect(options);
    const std::vector<Finding> findings = doctor::judge(facts);
    ddprun::print("{}", options.json ? doctor::render_json(facts, findings)
                                     : doctor::render_text(findings, terminal_style()));
    return worst(findings) == Severity::Error ? kSomethingWrong : 0;
}

}  // namespace ddprun
