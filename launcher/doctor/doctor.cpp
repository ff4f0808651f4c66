#include "launcher/doctor/doctor.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "env/print.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/doctor/collect.h"
#include "launcher/doctor/judge.h"
#include "launcher/doctor/render.h"
#include "launcher/doctor/trial.h"
#include "launcher/exit_codes.h"
#include "launcher/gpu_facts.h"

namespace ddprun {
namespace {

constexpr const char* kHelp =
    "usage: ddprun doctor [--json] [--no-run] [--seconds S] [--bytes SIZE]\n\n"
    "Looks at this machine as a place for training: driver, GPUs, CUDA, NCCL, network, memory, limits; runs "
    "a\n"
    "two-second all-reduce among its GPUs, or CPUs; says what is wrong and what to set.\n\n"
    "  --json        one JSON object instead of the table\n"
    "  --no-run      without the all-reduce\n"
    "  --seconds S   how long it lasts, up to 30; default 2\n"
    "  --bytes SIZE  how much each worker gives to it; default 256MiB of a GPU, else 64MiB\n\n"
    "Exit codes: 0 nothing is wrong (warnings included), 1 an error was found, 64 wrong usage.\n";

constexpr int kSomethingWrong = 1;

constexpr double kMostSeconds = 30;

struct Options {
    bool json = false, run = true, help = false;
    doctor::TrialSize size;
};

Error usage(std::string what) { return {Errc::InvalidArgument, std::move(what), 0}; }

/// The value of --seconds or --bytes.
Status set_size(const std::string& name, const std::string& value, doctor::TrialSize& size) {
    if (name == "--seconds") {
        const Result<double> seconds = parse_double(value);
        if (!seconds) return seconds.error().with(name);
        if (!(*seconds > 0 && *seconds <= kMostSeconds))
            return usage(fmt::format("{}: '{}' is not between 0 and {}", name, value, kMostSeconds));
        size.seconds = value;
        return {};
    }
    if (const Result<std::uint64_t> bytes = parse_bytes(value); !bytes) return bytes.error().with(name);
    size.bytes = value;
    return {};
}

Result<Options> parse(const std::vector<std::string>& words) {
    Options options;
    for (std::size_t at = 0; at < words.size(); ++at) {
        const std::size_t equals = words[at].find('=');
        const std::string name = words[at].substr(0, equals);
        if (name == "--seconds" || name == "--bytes") {
            if (equals == std::string::npos && at + 1 >= words.size()) return usage(name + ": needs a value");
            const std::string value =
                equals == std::string::npos ? words[++at] : words[at].substr(equals + 1);
            if (const Status set = set_size(name, value, options.size); !set) return set.error();
        } else if (words[at] == "--json") {
            options.json = true;
        } else if (words[at] == "--no-run" || words[at] == "--no_run") {
            options.run = false;
        } else if (words[at] == "-h" || words[at] == "--help") {
            options.help = true;
        } else {
            return usage(
                fmt::format("{}: unknown (expected --json, --no-run, --seconds or --bytes)", words[at]));
        }
    }
    return options;
}

int count_visible(const doctor::Facts& facts) {
    std::vector<Gpu> physical;
    for (const GpuFacts& gpu : facts.nvidia.gpus)
        physical.push_back({fmt::format("{}", gpu.index), gpu.uuid, gpu.numa_node});
    return static_cast<int>(visible_gpus(physical, facts.visible_devices).size());
}

doctor::Facts collect(const Options& options) {
    doctor::Facts facts;
    facts.host = doctor::collect_host();
    facts.nvidia = read_nvidia_facts(NvidiaDetail::AndTopology);
    facts.visible_devices = process_environment("CUDA_VISIBLE_DEVICES");
    facts.network = doctor::collect_network();
    facts.software = doctor::collect_software();
    if (!options.run) return facts;
    facts.trial = doctor::run_trial(
        doctor::plan_trial(facts.host, facts.nvidia, facts.software, count_visible(facts), options.size));
    return facts;
}

doctor::Look look_of_terminal() {
    doctor::Look look;
    winsize size{};
    if (::isatty(STDOUT_FILENO) == 0) return look;
    look.color = process_environment("NO_COLOR").value_or("").empty();
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60) look.width = size.ws_col;
    return look;
}

}  // namespace

int run_doctor(const std::vector<std::string>& words) {
    const Result<Options> options = parse(words);
    if (!options) {
        ddprun::print(stderr, "ddprun doctor: {}\n", options.error().what);
        return static_cast<int>(ExitCode::Usage);
    }
    if (options->help) {
        ddprun::print("{}", kHelp);
        return 0;
    }
    const doctor::Facts facts = collect(*options);
    const std::vector<Finding> findings = doctor::judge(facts);
    ddprun::print("{}", options->json ? doctor::render_json(facts, findings)
                                      : doctor::render_text(findings, look_of_terminal()));
    return worst(findings) == Severity::Error ? kSomethingWrong : 0;
}

}  // namespace ddprun
