#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"

/// A checkpoint of 1 GB against `dd` that writes and syncs as many bytes to the same disk, in turns. The bar
/// is the disk's speed. Both read from the page cache.
namespace {

using namespace ddp;
namespace fs = std::filesystem;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kBytes = 1'000'000'000, kTensors = 40;
constexpr int kTurns = 3;

Seconds time(const std::function<void()>& act) {
    const auto start = std::chrono::steady_clock::now();
    act();
    return std::chrono::steady_clock::now() - start;
}

void shell(const std::string& command) {
    if (std::system(command.c_str()) == 0) return;
    fmt::print(stderr, "bench_checkpoint: {} failed\n", command);
    std::exit(1);
}

Seconds median(std::vector<Seconds> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

struct Model {
    std::vector<float> values = std::vector<float>(kBytes / sizeof(float), 0.5F);
    std::vector<Tensor> tensors() {
        std::vector<Tensor> all;
        const std::size_t each = values.size() / kTensors;
        for (std::size_t i = 0; i < kTensors; ++i)
            all.push_back(tensor_of(fmt::format("layer{}.weight", i),
                                    std::span(values).subspan(i * each, each),
                                    {static_cast<std::int64_t>(each)}));
        return all;
    }
};

void print(const char* what, Seconds ours, Seconds dd) {
    fmt::print("{:<8} {:6.2f} s {:6.0f} MB/s    dd {:6.2f} s {:6.0f} MB/s    {:5.2f} of dd's time\n", what,
               ours.count(), kBytes / 1e6 / ours.count(), dd.count(), kBytes / 1e6 / dd.count(), ours / dd);
}

}  // namespace

/// The argument is a directory on the disk to measure.
int main(int argc, char** argv) {
    const std::string place = fmt::format("{}/bench_checkpoint.{}", argc > 1 ? argv[1] : ".", ::getpid());
    fs::create_directories(place);
    Model model;
    const std::vector<Tensor> tensors = model.tensors();
    CheckpointDirectory directory(place + "/ours", {.keep = 1});
    const std::string raw = place + "/raw";
    std::vector<Seconds> saves, loads, writes, reads;
    for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
        // Both write new files; removing the old ones is not timed.
        fs::remove_all(place + "/ours");
        fs::remove(raw);
        ::sync();
        std::string path;
        saves.push_back(time([&] { path = directory.save(tensors, {}, {turn, turn, {}, {}}); }));
        writes.push_back(time([&] {
            shell(fmt::format("dd if=/dev/zero of={} bs=1M count={} conv=fsync status=none", raw,
                              kBytes >> 20));
        }));
        loads.push_back(time([&] { load_checkpoint(path, tensors, {}); }));
        reads.push_back(time([&] { shell(fmt::format("dd if={} of=/dev/null bs=1M status=none", raw)); }));
    }
    fs::remove_all(place);
    fmt::print("a checkpoint of 1 GB in {} tensors, medians of {} in turns\n", kTensors, kTurns);
    print("save", median(saves), median(writes));
    print("load", median(loads), median(reads));
}
