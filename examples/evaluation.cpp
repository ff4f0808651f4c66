// Evaluation on all workers at once: each evaluates its share of a test set that does not divide evenly, and
// rank 0 gets all predictions in the order of the data, none twice. (A sampler would pad the shares, and
// count some samples twice.)
//
//     ddprun --nproc-per-node=4 ./evaluation
//
// Exits 0 when predictions and accuracy equal those of one worker with all samples, 1 otherwise.

#include <ddp/run.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kSamples = 1003;

/// Stands for a model and its test set; the prediction is right for most samples.
std::int32_t predict(std::size_t sample) { return static_cast<std::int32_t>(sample * sample % 7 % 4); }
std::int32_t label_of(std::size_t sample) { return static_cast<std::int32_t>(sample * sample % 7); }

/// The begin of each rank's share, and the end of the last one.
std::vector<std::size_t> shares(std::size_t ranks) {
    std::vector<std::size_t> begins;
    for (std::size_t rank = 0; rank <= ranks; ++rank) begins.push_back(kSamples * rank / ranks);
    return begins;
}

bool evaluate(ddp::ProcessGroup& group) {
    const std::vector<std::size_t> begins = shares(static_cast<std::size_t>(group.size()));
    const auto rank = static_cast<std::size_t>(group.rank());
    std::vector<std::int32_t> mine;
    std::int64_t correct = 0;
    for (std::size_t sample = begins[rank]; sample < begins[rank + 1]; ++sample) {
        mine.push_back(predict(sample));
        correct += mine.back() == label_of(sample) ? 1 : 0;
    }
    // Counts are added instead of averaging accuracies, because shares differ in size.
    group.all_reduce(ddp::buffer_of(std::span(&correct, 1))).wait();
    std::vector<std::size_t> counts;
    for (std::size_t r = 0; r + 1 < begins.size(); ++r) counts.push_back(begins[r + 1] - begins[r]);
    std::vector<std::int32_t> all(kSamples);
    group.all_gather_v(ddp::buffer_of(all), ddp::buffer_of(mine), counts).wait();

    std::int64_t expected = 0;
    for (std::size_t sample = 0; sample < kSamples; ++sample) {
        if (all[sample] != predict(sample)) {
            std::fprintf(stderr, "rank %d: the prediction of sample %zu is another one's\n", group.rank(),
                         sample);
            return false;
        }
        expected += predict(sample) == label_of(sample) ? 1 : 0;
    }
    if (group.rank() == 0)
        std::printf("%d workers: %.2f %% of %zu samples are right\n", group.size(),
                    100.0 * static_cast<double>(correct) / kSamples, kSamples);
    return correct == expected;
}

}  // namespace

int main() {
    return ddp::run([](ddp::World& world) { return evaluate(world) ? 0 : 1; });
}
