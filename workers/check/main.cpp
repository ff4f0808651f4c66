// allreduce-check: shows that the workers of a job can all-reduce, that the sums are right, and the
// bandwidth.
//
//     ddprun --nproc-per-node=4 allreduce-check
//
// Exit code 0: all sums are right; 1: they are not, or a worker could not take part; 64: wrong usage.

#include <sysexits.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/context.h"
#include "ddp/error_report.h"
#include "ddp/process_group.h"
#include "env/clock.h"
#include "env/print.h"
#include "env/text.h"
#include "measure.h"

namespace {

struct Options {
    std::chrono::nanoseconds span = std::chrono::seconds(2);
    std::size_t bytes = 64UL << 20;
    std::string device = "cpu";
    std::string backend = "auto";
    bool json = false;
};

constexpr const char* kUsage =
    "usage: ddprun [options] allreduce-check [--seconds S] [--bytes SIZE] [--device cpu|cuda] [--backend "
    "NAME] [--json]\n";

ddprun::Result<Options> parse_options(const std::vector<std::string>& words) {
    const auto wrong = [](const std::string& what) {
        return ddprun::Error{ddprun::Errc::InvalidArgument, what, 0};
    };
    Options options;
    for (std::size_t at = 0; at < words.size(); ++at) {
        const std::string name = words[at];
        if (name == "--json") {
            options.json = true;
            continue;
        }
        if (at + 1 >= words.size()) return wrong(name + ": unknown, or needs a value");
        const std::string value = words[++at];
        if (name == "--seconds") {
            const ddprun::Result<ddprun::Duration> span = ddprun::parse_duration(value);
            if (!span) return span.error().with(name);
            options.span = *span;
        } else if (name == "--bytes") {
            const ddprun::Result<std::uint64_t> bytes = ddprun::parse_bytes(value);
            if (!bytes) return bytes.error().with(name);
            if (*bytes < 4 || *bytes > (16ULL << 30))
                return wrong(name + ": '" + value + "' is not between 4 and 16GiB");
            options.bytes = *bytes / 4 * 4;
        } else if (name == "--device") {
            if (value != "cpu" && value != "cuda")
                return wrong(name + ": '" + value + "' is not cpu or cuda");
            options.device = value;
        } else if (name == "--backend") {
            options.backend = value;
        } else {
            return wrong(name + ": unknown option");
        }
    }
    return options;
}

/// A backend's description has no quotes, backslashes or control characters.
std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c != '"' && c != '\\') out += c;
    }
    return out + '"';
}

void print_result(const Options& options, ddp::ProcessGroup& group, const check::Measurement& result,
                  std::int64_t first_at_ns) {
    const double bandwidth = result.gigabytes_per_second(options.bytes);
    const double bus = result.bus_gigabytes_per_second(options.bytes, group.size());
    if (options.json) {
        ddprun::print(
            R"({{"allreduce_check": 1, "workers": {}, "backend": {}, "bytes": {}, "rounds": {}, "seconds": {:.6f}, )"
            R"("gigabytes_per_second": {:.4f}, "bus_gigabytes_per_second": {:.4f}, "first_at_ns": {}}})"
            "\n",
            group.size(), quoted(group.describe()), options.bytes, result.rounds, result.seconds, bandwidth,
            bus, first_at_ns);
    } else {
        ddprun::print(
            "{} workers, {}: {} x {} in {:.2f} s, {:.2f} GB/s ({:.2f} GB/s bus bandwidth), all sums right\n",
            group.size(), group.describe(), result.rounds, ddprun::format_bytes(options.bytes),
            result.seconds, bandwidth, bus);
    }
}

int run(const std::vector<std::string>& words) {
    const ddp::Context context = ddp::Context::from_env();
    const ddprun::Result<Options> options = parse_options(words);
    if (!options) {
        if (context.rank() == 0)
            ddprun::print(stderr, "allreduce-check: {}\n{}", options.error().what, kUsage);
        return EX_USAGE;
    }
    ddp::ProcessGroupOptions wanted;
    wanted.timeout = std::chrono::seconds(60);
    wanted.backend = options->backend;
    if (options->device == "cuda") wanted.device = {ddp::Device::Kind::Cuda, -1};
    const std::unique_ptr<ddp::ProcessGroup> group = ddp::ProcessGroup::create(context, wanted);
    check::Values values(*group, options->bytes);
    check::verify_sums(*group, values);
    const std::int64_t first_at_ns = ddprun::MonotonicClock::now().time_since_epoch().count();
    const check::Measurement result = check::measure(*group, values, options->span);
    // Verify again: an error under load would otherwise give a fast and false result.
    check::verify_sums(*group, values);
    group->barrier().synchronize();
    if (group->rank() == 0) print_result(*options, *group, result, first_at_ns);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return ddp::run_main("allreduce-check", [&] { return run({argv + 1, argv + argc}); });
}
