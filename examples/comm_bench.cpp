// Measures broadcast and all-reduce between the ranks: 10^3 to 10^8 floats, two warm-up runs and twenty timed
// ones, in host memory or, with --device cuda, in the memory of GPUs.
//
//     ddprun --nproc-per-node=4 ./comm_bench --max-bytes 40000000 --csv comm.csv
//
// Exits 0 when every result was right before and after the timed runs, 1 otherwise.

#include <ddp/context.h>
#include <ddp/process_group.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <string>
#include <vector>

#include "measure.h"  // check::Values: floats in host or device memory

extern char** environ;

namespace {

constexpr int kWarmUps = 2, kRuns = 20;

struct Options {
    std::size_t max_bytes = 100'000'000;
    std::string csv, device = "cpu", backend = "auto";
};

Options read_options(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i], name = word.substr(0, word.find('='));
        const std::string value = name != word ? word.substr(name.size() + 1) : i + 1 < argc ? argv[++i] : "";
        if (name == "--csv") options.csv = value;
        else if (name == "--device") options.device = value;
        else if (name == "--backend") options.backend = value;
        else if (name != "--max-bytes")
            throw ddp::InvalidInput(name + ": unknown option (--max-bytes, --csv, --device, --backend)");
        else if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos)
            throw ddp::InvalidInput("--max-bytes: '" + value + "' is not a number");
        else options.max_bytes = std::strtoull(value.c_str(), nullptr, 10);
    }
    if (options.max_bytes < 4000) throw ddp::InvalidInput("--max-bytes: at least 4000, the smallest size");
    if (options.device != "cpu" && options.device != "cuda")
        throw ddp::InvalidInput("--device: '" + options.device + "' is not cpu or cuda");
    return options;
}

/// The sizes from 10^3 to 10^8 floats, up to --max-bytes.
std::vector<std::size_t> sizes(std::size_t max_bytes) {
    std::vector<std::size_t> counts;
    for (std::size_t count = 1000; count <= 100'000'000 && count * sizeof(float) <= max_bytes; count *= 10)
        counts.push_back(count);
    return counts;
}

/// The values of a rank: small whole numbers, so that sums are exact in any order.
float value_of(int rank, std::size_t at) {
    return static_cast<float>((rank % 16 + 1) * static_cast<int>(at % 251));
}

struct Operation {
    const char* name;
    ddp::Work (*start)(ddp::ProcessGroup& group, ddp::Buffer buffer);
    float (*expected)(int ranks, std::size_t at);
    double (*bus_factor)(double ranks);  ///< bytes on a rank's link per byte of the buffer, as in nccl-tests
};

const Operation kOperations[] = {
    {"broadcast", [](ddp::ProcessGroup& group, ddp::Buffer buffer) { return group.broadcast(buffer, 0); },
     [](int, std::size_t at) { return value_of(0, at); }, [](double) { return 1.0; }},
    {"all_reduce", [](ddp::ProcessGroup& group, ddp::Buffer buffer) { return group.all_reduce(buffer); },
     [](int ranks, std::size_t at) {
         float sum = 0;
         for (int rank = 0; rank < ranks; ++rank) sum += value_of(rank, at);
         return sum;
     },
     [](double ranks) { return 2 * (ranks - 1) / ranks; }}};

struct Bench {
    ddp::ProcessGroup& group;
    check::Values& values;

    /// Makes one call on known numbers. Throws ddp::Error naming rank, operation, position and both values.
    void verify(const Operation& operation, std::size_t count) {
        std::vector<float> mine(values.buffer().count);
        for (std::size_t at = 0; at < count; ++at) mine[at] = value_of(group.rank(), at);
        values.fill(mine);
        operation.start(group, prefix(count)).synchronize();
        const std::vector<float> all = values.read();
        for (std::size_t at = 0; at < count; ++at) {
            if (all[at] == operation.expected(group.size(), at)) continue;
            throw ddp::Error("rank " + std::to_string(group.rank()) + ": " + operation.name + " of " +
                             std::to_string(count) + " floats: at " + std::to_string(at) + " there is " +
                             std::to_string(all[at]) + " in place of " +
                             std::to_string(operation.expected(group.size(), at)));
        }
    }

    /// The time of one call on the slowest rank, in seconds.
    double time(const Operation& operation, std::size_t count) {
        values.fill(
            std::vector<float>(values.buffer().count));  // repeated sums of other values would overflow
        for (int i = 0; i < kWarmUps; ++i) operation.start(group, prefix(count)).wait();
        group.barrier().synchronize();
        const auto start = std::chrono::steady_clock::now();
        ddp::Work last;
        for (int i = 0; i < kRuns; ++i) {
            last = operation.start(group, prefix(count));
            last.wait();
        }
        last.synchronize();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kRuns;
        double slowest = 0;
        for (const std::string& one : group.all_gather_bytes(std::to_string(seconds * 1e9)))
            slowest = std::max(slowest, std::strtod(one.c_str(), nullptr) / 1e9);
        return slowest;
    }

    [[nodiscard]] ddp::Buffer prefix(std::size_t count) const {
        ddp::Buffer buffer = values.buffer();
        buffer.count = count;
        return buffer;
    }
};

/// Appends to the file; a new one begins with column names and the variables that affect collectives.
class CsvLog {
  public:
    explicit CsvLog(const std::string& path)
        : file_(path.empty() ? nullptr : std::fopen(path.c_str(), "ae")) {
        if (path.empty()) return;
        if (file_ == nullptr) throw ddp::FileError(path + ": cannot be written");
        std::fseek(file_, 0, SEEK_END);
        if (std::ftell(file_) > 0) return;
        for (char** at = environ; *at != nullptr; ++at) {
            const std::string one = *at;
            for (const char* prefix : {"NCCL_", "FI_", "OMP_NUM_THREADS="}) {
                if (one.starts_with(prefix)) std::fprintf(file_, "# %s\n", one.c_str());
            }
        }
        std::fputs(
            "unix_time,host,world_size,backend,operation,floats,bytes,seconds,gigabytes_per_second,bus_gigabytes_per_second\n",
            file_);
    }
    ~CsvLog() {
        if (file_ != nullptr) std::fclose(file_);
    }
    CsvLog(const CsvLog&) = delete;
    CsvLog& operator=(const CsvLog&) = delete;

    void add(const ddp::ProcessGroup& group, const Operation& operation, std::size_t count, double seconds,
             double rate, double bus) {
        if (file_ == nullptr) return;
        char host[256] = "";
        ::gethostname(host, sizeof host - 1);
        std::fprintf(file_, "%lld,%s,%d,\"%s\",%s,%zu,%zu,%.9f,%.4f,%.4f\n",
                     static_cast<long long>(std::time(nullptr)), host, group.size(), group.describe().c_str(),
                     operation.name, count, count * sizeof(float), seconds, rate, bus);
    }

  private:
    std::FILE* file_;
};

void run(const ddp::Context& context, const Options& options) {
    ddp::ProcessGroupOptions wanted;
    wanted.backend = options.backend;
    if (options.device == "cuda") wanted.device = {ddp::Device::Kind::Cuda, -1};
    const auto group = ddp::ProcessGroup::create(context, wanted);
    const std::vector<std::size_t> counts = sizes(options.max_bytes);
    check::Values values(*group, counts.back() * sizeof(float));
    const bool is_first = group->rank() == 0;
    CsvLog log(is_first ? options.csv : "");
    if (is_first)
        std::printf("%d ranks, %s; %d runs after %d\n%-10s  %11s  %12s  %10s  %10s\n", group->size(),
                    group->describe().c_str(), kRuns, kWarmUps, "operation", "bytes", "us", "GB/s",
                    "bus GB/s");
    Bench bench{*group, values};
    for (const Operation& operation : kOperations) {
        for (const std::size_t count : counts) {
            bench.verify(operation, count);
            const double seconds = bench.time(operation, count);
            bench.verify(operation, count);
            const double rate = static_cast<double>(count * sizeof(float)) / seconds / 1e9,
                         bus = rate * operation.bus_factor(group->size());
            if (!is_first) continue;
            std::printf("%-10s  %11zu  %12.1f  %10.3f  %10.3f\n", operation.name, count * sizeof(float),
                        seconds * 1e6, rate, bus);
            log.add(*group, operation, count, seconds, rate, bus);
        }
    }
    group->barrier().synchronize();
    if (is_first) std::printf("all results were right\n");
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    run(ddp::Context::from_env(), read_options(argc, argv));
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "comm_bench: %s\n", error.what());
    return 1;
}
