// Training with shards against training without: the same bits, whoever holds what.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>

#include "ddp/checkpoint.h"
#include "ddp/model.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/on_nodes.h"

namespace {

using ddp::Model;
using ddp::ProcessGroup;
using ddp::Shard;
using ddp::TensorSpec;
using ddp::testing::run_ranks;
using ddp::testing::SeveralNodes;
using ddprun::test::TemporaryDirectory;

constexpr std::array kShards = {Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Parameters};

/// A number in [-1, 1) for each key, whichever machine computes it.
double noise(std::uint64_t key) {
    key += 0x9e3779b97f4a7c15;
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
    key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((key ^ (key >> 31)) >> 11) * 0x1p-52 - 1;
}

/// A training job drawn from a seed; everything in it but the world and the shards decides its result.
struct Job {
    std::vector<TensorSpec> tensors;
    bool adamw = false, clips = false;
    int passes = 1;  ///< whose gradients are added up for a step
    std::uint64_t seed = 0;

    static Job draw(std::uint64_t seed) {
        std::mt19937_64 random(seed);
        const auto below = [&](std::uint64_t n) { return random() % n; };
        Job job;
        job.seed = seed;
        job.adamw = below(2) == 0;
        job.clips = below(2) == 0;
        job.passes = below(2) == 0 ? 1 : 3;
        const std::uint64_t count = 1 + below(6);
        for (std::uint64_t i = 0; i < count; ++i) {
            const bool is_large = below(3) == 0;
            const auto rows = static_cast<std::int64_t>(1 + below(is_large ? 90 : 7)),
                       columns = static_cast<std::int64_t>(1 + below(is_large ? 90 : 40));
            job.tensors.push_back({.name = "t" + std::to_string(i),
                                   .shape = below(3) == 0 ? std::vector{rows} : std::vector{rows, columns},
                                   .dtype = below(5) == 0 ? ddp::DType::F64 : ddp::DType::F32,
                                   .unit = i / 2});
        }
        return job;
    }
};

/// One job on one rank.
class Run {
  public:
    Run(ProcessGroup& group, const Job& job, Shard shard)
        : job_(job),
          group_(group),
          model_(group, job.tensors,
                 {.shard = shard,
                  .accumulates = job.passes > 1,
                  .overlaps_gather = true,
                  .limits = {.first_bytes = 4096, .cap_bytes = 16384}}),
          sampler_(1000, group.size(), group.rank(), {.seed = 1}) {
        for (std::size_t i = 0; group.rank() == 0 && i < job.tensors.size(); ++i) fill(i);
        optimizer_ = job.adamw ? ddp::make_adamw(model_, {.learning_rate = 0.01})
                               : ddp::make_sgd(model_, {.learning_rate = 0.05, .momentum = 0.9});
    }

    void steps(int count) {
        for (; count > 0; --count) {
            for (int pass = 0; pass < job_.passes; ++pass) {
                const auto accumulating = model_.no_sync(pass + 1 < job_.passes);
                backward(pass);
                model_.finish();
            }
            if (job_.clips) ddp::clip_grad_norm(model_, 0.5);
            optimizer_->step();
            sampler_.advance(1);
        }
    }
    std::string digest() { return model_.verify_equal_parameters(); }
    void save(const std::string& directory) {
        ddp::CheckpointDirectory(directory).save(group_, {model_, *optimizer_, sampler_});
    }
    void load(const std::string& directory) {
        EXPECT_TRUE(ddp::CheckpointDirectory(directory).load(group_, {model_, *optimizer_, sampler_}));
    }

  private:
    template <class Use>
    void with_type(std::size_t i, Use use) {
        if (job_.tensors[i].dtype == ddp::DType::F64) use(double());
        else use(float());
    }
    void fill(std::size_t i) {
        with_type(i, [&](auto zero) {
            using T = decltype(zero);
            std::uint64_t key = job_.seed * 1000 + i;
            for (T& weight : model_.weights<T>(i)) weight = static_cast<T>(noise(key += 1 << 20));
        });
    }
    /// Gradients follow from weights, step, pass and rank.
    void backward(int pass) {
        for (std::size_t unit = job_.tensors.back().unit + 1; unit-- > 0;) {
            model_.gather(unit);
            for (std::size_t i = job_.tensors.size(); i-- > 0;) {
                if (job_.tensors[i].unit != unit) continue;
                write_gradient(i, pass);
                model_.mark_ready(i);
            }
            model_.release(unit);
        }
    }
    void write_gradient(std::size_t i, int pass) {
        with_type(i, [&](auto zero) {
            using T = decltype(zero);
            const std::span<const T> weights = model_.weights<T>(i);
            const std::span<T> gradient = model_.gradient_as<T>(i);
            std::uint64_t key = (optimizer_->steps() * 8 + static_cast<std::uint64_t>(pass)) * 8 +
                                static_cast<std::uint64_t>(group_.rank());
            for (std::size_t e = 0; e < gradient.size(); ++e) {
                const T value = weights[e] / 4 + static_cast<T>(noise(key += 1 << 20));
                gradient[e] = pass > 0 ? gradient[e] + value : value;
            }
        });
    }

    const Job& job_;
    ProcessGroup& group_;
    Model model_;
    ddp::DistributedSampler sampler_;
    std::unique_ptr<ddp::Optimizer> optimizer_;
};

/// The ranks of a world by node, and what they divide.
struct World {
    std::vector<int> nodes;
    Shard shard = Shard::None;

    void run(const std::function<void(ProcessGroup&)>& fn) const {
        if (nodes.size() == 1) return run_ranks(nodes[0], fn);
        SeveralNodes(nodes).run(fn);
    }
    [[nodiscard]] std::string name() const {
        return fmt::format("{} on {}", name_of(shard), fmt::join(nodes, " + "));
    }
};

/// The digest of the weights after two steps in one world, a checkpoint, and two steps in another.
std::string digest_of(const Job& job, const World& first, const World& second) {
    const TemporaryDirectory directory;
    first.run([&](ProcessGroup& group) {
        Run run(group, job, first.shard);
        run.steps(2);
        run.save(directory.path());
    });
    std::string digest;
    second.run([&](ProcessGroup& group) {
        Run run(group, job, second.shard);
        run.load(directory.path());
        run.steps(2);
        const std::string mine = run.digest();
        if (group.rank() == 0) digest = mine;
    });
    return digest;
}

bool can_span_nodes() {
    try {
        ddp::net::open_fabric_link("127.0.0.1");
        return true;
    } catch (const ddp::InvalidInput&) {
        return false;
    }
}

TEST(ShardedTraining, HasTheBitsOfUnshardedTrainingThroughAStopAndAResume) {
    const bool several_nodes = can_span_nodes();
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        std::mt19937_64 random(seed * 77);
        const Job job = Job::draw(seed);
        const auto draw_nodes = [&] {
            const auto ranks = static_cast<int>(1 + random() % 5);
            if (ranks == 1 || !several_nodes || random() % 2 == 0) return std::vector{ranks};
            const auto here = static_cast<int>(1 + random() % static_cast<std::uint64_t>(ranks - 1));
            return std::vector{here, ranks - here};
        };
        const World first{draw_nodes()}, second{draw_nodes()};
        const std::string whole = digest_of(job, first, second);
        for (const Shard shard : kShards) {
            const World sharded{first.nodes, shard},
                resumed{second.nodes, kShards[random() % kShards.size()]};
            EXPECT_EQ(digest_of(job, sharded, resumed), whole)
                << "seed " << seed << ": " << sharded.name() << ", then " << resumed.name();
        }
    }
}

}  // namespace
