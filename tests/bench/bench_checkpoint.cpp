#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/optimizer.h"
#include "ddp/testing.h"

/// A checkpoint of 1 GB against `dd` that writes and syncs as many bytes to the same disk, in turns. The bar
/// is the disk's speed. Both read from the page cache. Then an asynchronous one beside training steps of two
/// ranks, of which the first writes all: the bar is 5 % of the steps that run meanwhile.
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

struct Weights {
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

/// The whole state of a job: on rank 0 the model, elsewhere nothing.
struct Job : Stateful {
    explicit Job(const ProcessGroup& group) {
        if (group.rank() == 0) model.emplace();
    }
    std::vector<Tensor> state() const override { return model ? model->tensors() : std::vector<Tensor>{}; }
    mutable std::optional<Weights> model;
};

/// Some milliseconds of arithmetic and an all-reduce, which also tells whether rank 0 still wants more steps.
class Step {
  public:
    explicit Step(ProcessGroup& group) : group_(group), gradients_(1 << 20) {}
    bool run(bool wants_more) {
        for (int pass = 0; pass < 60; ++pass) {
            for (float& value : weights_) value = value * 0.999F + 0.001F;
        }
        std::ranges::fill(gradients_, weights_[0]);
        gradients_[0] = wants_more ? 1.0F : 0.0F;
        group_.all_reduce(buffer_of(gradients_)).wait();
        return gradients_[0] > 0;
    }

  private:
    ProcessGroup& group_;
    std::vector<float> weights_ = std::vector<float>(100'000, 1.0F), gradients_;
};

void save_beside_steps(ProcessGroup& group, const std::string& place) {
    // As many as run beside a save; the first ones are not timed, while the ranks still find their cores.
    constexpr int kQuietSteps = 300;
    Job job(group);
    std::vector<float> parameter(1);
    const auto sgd = make_sgd({tensor_of("w", std::span(parameter), {1})}, {});
    DistributedSampler sampler(100, group.size(), group.rank(), {.seed = 1});
    const Training training{job, *sgd, sampler};
    CheckpointDirectory directory(place, {.keep = 1, .asynchronous = true});
    Step step(group);
    const bool is_first = group.rank() == 0;
    directory.save(group, training);  // the first touches the pages of the copy
    std::vector<Seconds> blocking, quiet, meanwhile;
    int steps = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
        directory.finish(group);
        fs::remove(place + "/latest");
        for (int i = 0; i < kQuietSteps; ++i) step.run(true);
        quiet.push_back(time([&] {
                            for (int i = 0; i < kQuietSteps; ++i) step.run(true);
                        }) /
                        kQuietSteps);
        blocking.push_back(time([&] { directory.save(group, training); }));
        int beside = 0;
        const Seconds all = time([&] {
            while (step.run(is_first && !fs::exists(place + "/latest"))) ++beside;
        });
        meanwhile.push_back(all / (beside + 1));
        steps += beside + 1;
    }
    if (!is_first) return;
    fmt::print(
        "asynchronous: save() returned after {:.3f} s; steps of {:.2f} ms, {:.2f} ms meanwhile ({} steps): {:+.1f} %\n",
        median(blocking).count(), median(quiet).count() * 1e3, median(meanwhile).count() * 1e3, steps,
        (median(meanwhile) / median(quiet) - 1) * 100);
}

}  // namespace

/// The argument is a directory on the disk to measure.
int main(int argc, char** argv) {
    const std::string place = fmt::format("{}/bench_checkpoint.{}", argc > 1 ? argv[1] : ".", ::getpid());
    fs::create_directories(place);
    Weights model;
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
    fs::create_directories(place);
    testing::run_ranks(2, [&](ProcessGroup& group) { save_beside_steps(group, place + "/beside"); });
    fs::remove_all(place);
}
