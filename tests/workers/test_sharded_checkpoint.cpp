// Tests of checkpoints of sharded state: every rank writes some files, and any number of ranks can load them.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "ddp/checkpoint.h"
#include "ddp/optimizer.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/interrupted.h"
#include "tests/workers/on_nodes.h"
#include "tests/workers/sharded_job.h"

namespace {

namespace fs = std::filesystem;
using ddp::CheckpointDirectory;
using ddp::ProcessGroup;
using ddp::Tensor;
using namespace ddp::testing;
using ddprun::test::TemporaryDirectory;

std::string text_in(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

void save(const std::string& place, int ranks, bool sharded = true, float value = 1) {
    run_ranks(ranks, [&](ProcessGroup& group) {
        ShardedJob job(group, sharded);
        job.fill(value);
        CheckpointDirectory(place).save(group, job.training());
    });
}

TEST(ShardedCheckpoint, LoadsOnAnyNumberOfRanksShardedOrNot) {
    for (int savers = 1; savers <= 4; ++savers) {
        for (const bool was_sharded : {true, false}) {
            const TemporaryDirectory place;
            save(place.path(), savers, was_sharded, 3);
            for (int loaders = 1; loaders <= 4; ++loaders) {
                for (const bool is_sharded : {true, false}) {
                    run_ranks(loaders, [&](ProcessGroup& group) {
                        ShardedJob job(group, is_sharded);
                        ASSERT_TRUE(CheckpointDirectory(place.path()).load(group, job.training()));
                        EXPECT_TRUE(job.holds(3)) << savers << " ranks wrote, " << loaders << " read";
                        EXPECT_EQ(job.loads(), 2);
                    });
                }
            }
        }
    }
}

class ShardedCheckpointOnNodes : public ddp::testing::OnNodes {};
INSTANTIATE_TEST_SUITE_P(, ShardedCheckpointOnNodes, ddp::testing::three_ranks(),
                         ddp::testing::name_of_nodes);

TEST_P(ShardedCheckpointOnNodes, IsWrittenByEveryRankAndReadBack) {
    for (const bool asynchronous : {false, true}) {
        const TemporaryDirectory place;
        run([&](ProcessGroup& group) {
            ShardedJob job(group);
            CheckpointDirectory checkpoints(place.path(), {.asynchronous = asynchronous});
            for (const float value : {1.0F, 2.0F}) {
                job.fill(value);
                checkpoints.save(group, job.training());
            }
            job.fill(9);  // not what was saved
            checkpoints.finish(group);
            checkpoints.load(group, job.training());
            EXPECT_TRUE(job.holds(2));
        });
        EXPECT_EQ(names_in(place.path()), (std::vector<std::string>{"latest", "step-000007"}));
    }
}

TEST(ShardedCheckpoint, HasHuggingFacesFilesAndIndex) {
    const TemporaryDirectory place;
    save(place.path(), 2);
    const std::string checkpoint = place.file("step-000007");
    EXPECT_EQ(names_in(checkpoint),
              (std::vector<std::string>{
                  "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                  "model.safetensors.index.json", "optimizer-00001-of-00002.safetensors",
                  "optimizer-00002-of-00002.safetensors", "optimizer.safetensors.index.json", "state.json"}));
    const auto file = ddp::SafetensorsFile::open(checkpoint + "/model-00002-of-00002.safetensors");
    EXPECT_EQ(file.metadata().at("format"), "pt");
    std::string index = text_in(checkpoint + "/model.safetensors.index.json");
    const std::string id = file.metadata().at("save");
    index.replace(index.find(id), id.size(), "ID");
    EXPECT_EQ(index, R"({
  "metadata": {
    "total_size": 4480,
    "save": "ID"
  },
  "weight_map": {
    "embedding": "model-00001-of-00002.safetensors",
    "bias": "model-00002-of-00002.safetensors",
    "none": "model-00001-of-00002.safetensors",
    "wide": "model-00002-of-00002.safetensors",
    "count": "model-00001-of-00002.safetensors"
  }
}
)");
}

/// Loads on two ranks; expects the same refusal on both, and unchanged tensors.
std::string refusal(const std::string& place) {
    const auto failures = failures_of_ranks(2, [&](ProcessGroup& group) {
        ShardedJob job(group);
        job.fill(5);
        try {
            CheckpointDirectory(place).load(group, job.training());
        } catch (const ddp::Error&) {
            EXPECT_TRUE(job.holds(5));
            throw;
        }
    });
    EXPECT_EQ(message_of(failures[0]), message_of(failures[1]));
    return message_of(failures[0]);
}

TEST(ShardedCheckpoint, IsRefusedByFileWhenOneIsMissingDamagedOrOfAnotherSave) {
    const TemporaryDirectory place;
    const std::string checkpoint = place.file("step-000007"),
                      index = checkpoint + "/model.safetensors.index.json",
                      shard = checkpoint + "/model-00002-of-00002.safetensors";
    save(place.path(), 2);
    fs::remove(shard);
    EXPECT_EQ(refusal(place.path()), index + ": its file model-00002-of-00002.safetensors is missing");

    save(place.path(), 2);
    const TemporaryDirectory other;
    save(other.path(), 2);
    fs::copy_file(other.file("step-000007/model-00002-of-00002.safetensors"), shard,
                  fs::copy_options::overwrite_existing);
    EXPECT_EQ(refusal(place.path()), shard + ": is of another save than " + index);

    save(place.path(), 2);
    fs::resize_file(shard, fs::file_size(shard) - 1);
    EXPECT_EQ(refusal(place.path()).rfind(shard + ": truncated", 0), 0U) << refusal(place.path());

    save(place.path(), 2);
    fs::remove(index);
    EXPECT_NE(refusal(place.path()).find("model.safetensors: No such file"), std::string::npos);
}

TEST(ShardedCheckpoint, IsRefusedWithAnIndexThatDoesNotFitItsFiles) {
    const TemporaryDirectory place;
    save(place.path(), 2);
    const std::string index = place.file("step-000007/model.safetensors.index.json");
    const std::string good = text_in(index);
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string text = good;
        const std::size_t at = text.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        std::ofstream(index, std::ios::trunc) << text.replace(at, from.size(), to);
        return refusal(place.path());
    };
    const std::string one = "\"model-00001-of-00002.safetensors\"",
                      two = "\"model-00002-of-00002.safetensors\"";
    EXPECT_EQ(with("4480", "4479"), index + ": its files hold 4480 bytes of tensors, it says another number");
    EXPECT_EQ(with("\"bias\": " + two, "\"bias\": " + one),
              index + ": tensor 'bias' is not in its file model-00001-of-00002.safetensors");
    EXPECT_EQ(with("\"bias\": " + two + ",", ""), index + ": lists 4 tensors, its files hold 5");
    EXPECT_EQ(
        with(one, "\"../x.safetensors\""),
        index + ": '../x.safetensors', the file of tensor 'embedding', is no name of a safetensors file");
    EXPECT_EQ(with(one, "7"),
              index + ": '', the file of tensor 'embedding', is no name of a safetensors file");
    EXPECT_EQ(with(one, "\"model.safetensors.index.json\""),
              index +
                  ": 'model.safetensors.index.json', the file of tensor 'embedding', is no name of a "
                  "safetensors file");
    EXPECT_EQ(with("weight_map", "x"), index + ": not an index of safetensors files");
    EXPECT_EQ(with("{", ""), index + ": not an index of safetensors files");
}

TEST(ShardedCheckpoint, IsRefusedForAnotherModel) {
    const TemporaryDirectory place;
    save(place.path(), 2);
    const auto failures = failures_of_ranks(3, [&](ProcessGroup& group) {
        ShardedJob job(group);
        job.model.rename("bias", "offset");
        CheckpointDirectory(place.path()).load(group, job.training());
    });
    for (const auto& failure : failures)
        EXPECT_EQ(message_of(failure), place.file("step-000007/model.safetensors.index.json") +
                                           ": tensor 'offset' is missing there, float32[7] in this program");
}

TEST(ShardedCheckpoint, IsNotSavedUnlessThePartsMakeUpTheTensors) {
    const TemporaryDirectory place;
    for (const auto& [rank, shift, element] : {std::tuple{0, 1, "0"}, {1, -1, "559"}}) {
        const auto failures = failures_of_ranks(2, [&, rank = rank, shift = shift](ProcessGroup& group) {
            ShardedJob job(group);
            if (group.rank() == rank) job.model.move_part("embedding", shift);
            CheckpointDirectory(place.path()).save(group, job.training());
        });
        for (const auto& failure : failures) {
            EXPECT_TRUE(ddp::testing::is<ddp::InvalidInput>(failure));
            EXPECT_EQ(message_of(failure),
                      std::string(
                          "checkpoint: the ranks' parts of tensor 'embedding' do not make it up: element ") +
                          element + " is in none or in two");
        }
    }
    const auto failures = failures_of_ranks(2, [&](ProcessGroup& group) {
        ShardedJob job(group);
        if (group.rank() == 1) job.model.rename("bias", "offset");
        CheckpointDirectory(place.path()).save(group, job.training());
    });
    for (const auto& failure : failures)
        EXPECT_EQ(message_of(failure), "checkpoint: rank 1 lists other tensors of 'model' than rank 0");
    EXPECT_TRUE(fs::is_empty(place.path()));
}

TEST(ShardedCheckpoint, IsJoinedIntoOneFile) {
    const TemporaryDirectory place;
    save(place.path(), 3, true, 4);
    const std::string index = place.file("step-000007/model.safetensors.index.json");
    ddp::join_shards(index, place.file("model"));
    run_ranks(1, [&](ProcessGroup& group) {
        ShardedJob job(group, false);
        const auto file = ddp::SafetensorsFile::open(place.file("model"));
        file.read_into(job.model.state());
        EXPECT_TRUE(job.model.holds(4));
        EXPECT_EQ(file.metadata(), (ddp::Metadata{{"format", "pt"}, {"step", "7"}}));
    });
    fs::remove(place.file("step-000007/model-00002-of-00003.safetensors"));
    EXPECT_THROW(ddp::join_shards(index, place.file("again")), ddp::InvalidInput);
    EXPECT_FALSE(fs::exists(place.file("again")));
}

/// Makes fsync fail in this thread and those that it starts: in one rank.
void break_the_disk() { EXPECT_TRUE(ddprun::test::refuse_calls({SYS_fsync, SYS_fsync, EIO})); }

/// The ways in which the error of an asynchronous save reaches the program.
using Caller = void (*)(CheckpointDirectory&, ProcessGroup&, ShardedJob&);
constexpr std::pair<const char*, Caller> kCallers[] = {
    {"finish", [](CheckpointDirectory& to, ProcessGroup& group, ShardedJob&) { to.finish(group); }},
    {"save",
     [](CheckpointDirectory& to, ProcessGroup& group, ShardedJob& job) { to.save(group, job.training()); }},
    {"load",
     [](CheckpointDirectory& to, ProcessGroup& group, ShardedJob& job) { to.load(group, job.training()); }},
};

TEST(AsynchronousCheckpoint, ThrowsOneRanksErrorOnAllRanksAtTheNextCallAndOnlyThere) {
    for (const int broken : {0, 1, 2}) {
        for (const auto& [name, call] : kCallers) {
            const TemporaryDirectory place;
            save(place.path(), 3, true, 1);
            const auto failures = failures_of_ranks(3, [&, call = call](ProcessGroup& group) {
                if (group.rank() == broken) break_the_disk();
                ShardedJob job(group);
                job.fill(2);
                CheckpointDirectory checkpoints(place.path(), {.asynchronous = true});
                EXPECT_NO_THROW(checkpoints.save(group, job.training()));
                try {
                    call(checkpoints, group, job);
                } catch (const ddp::FileError&) {
                    EXPECT_NO_THROW(checkpoints.finish(group));
                    EXPECT_TRUE(checkpoints.load(group, job.training()));
                    EXPECT_TRUE(job.holds(1)) << "the checkpoint before it";
                    throw;
                }
            });
            for (const auto& failure : failures) {
                const std::string what = message_of(failure);
                EXPECT_EQ(what, message_of(failures[0])) << name;
                EXPECT_NE(what.find("/model-0000" + std::to_string(broken + 1) +
                                    "-of-00003.safetensors: fsync: Input/output error"),
                          std::string::npos)
                    << name << ": " << what;
            }
            EXPECT_EQ(names_in(place.path()), (std::vector<std::string>{"latest", "step-000007"}));
        }
    }
}

TEST(ShardedCheckpoint, ThrowsOneRanksErrorOnAllRanks) {
    const TemporaryDirectory place;
    const auto failures = failures_of_ranks(3, [&](ProcessGroup& group) {
        if (group.rank() == 2) break_the_disk();
        ShardedJob job(group);
        CheckpointDirectory(place.path()).save(group, job.training());
    });
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<ddp::FileError>(failure));
        EXPECT_NE(message_of(failure).find("/model-00003-of-00003.safetensors: fsync: Input/output error"),
                  std::string::npos)
            << message_of(failure);
    }
    EXPECT_TRUE(fs::is_empty(place.path()));
}

TEST(AsynchronousCheckpoint, IsWrittenToItsEndWhenTheProgramEnds) {
    const TemporaryDirectory place;
    run_ranks(3, [&](ProcessGroup& group) {
        ShardedJob job(group);
        job.fill(2);
        CheckpointDirectory checkpoints(place.path(), {.asynchronous = true});
        checkpoints.save(group, job.training());
        job.fill(3);
    });
    EXPECT_EQ(names_in(place.path()), (std::vector<std::string>{"latest", "step-000007"}));
    run_ranks(1, [&](ProcessGroup& group) {
        ShardedJob job(group);
        EXPECT_TRUE(CheckpointDirectory(place.path()).load(group, job.training()));
        EXPECT_TRUE(job.holds(2));
    });
}

TEST(AsynchronousCheckpoint, PrintsAnErrorThatNobodyAskedFor) {
    const TemporaryDirectory place;
    ::testing::internal::CaptureStderr();
    run_ranks(1, [&](ProcessGroup& group) {
        break_the_disk();
        ShardedJob job(group);
        CheckpointDirectory checkpoints(place.path(), {.asynchronous = true});
        checkpoints.save(group, job.training());
    });
    const std::string printed = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(printed.rfind("ddp: ", 0), 0U) << printed;
    EXPECT_NE(printed.find("fsync: Input/output error\n"), std::string::npos) << printed;
}

/// A job whose values are its step.
void save_step(ProcessGroup& group, CheckpointDirectory& checkpoints, std::uint64_t step) {
    ShardedJob job(group);
    job.momentum.step = step;
    job.fill(static_cast<float>(step));
    checkpoints.save(group, job.training());
    checkpoints.finish(group);
}

/// The step of the newest checkpoint, 0 unless it is whole.
std::uint64_t whole_step_in(const std::string& place) {
    std::uint64_t step = 0;
    run_ranks(1, [&](ProcessGroup& group) {
        ShardedJob job(group);
        const auto state = CheckpointDirectory(place).load(group, job.training());
        if (state && job.holds(static_cast<float>(state->step))) step = state->step;
    });
    return step;
}

/// Saves a step with enough room, and another with little. 0: both exist; 1: the second failed on every rank
/// because of the full disk, and the first is whole; any other number is a failure.
int save_on_a_small_disk(const std::string& place, int pages, int files) {
    if (!mount_small_disk(place)) return kNotAllowed;
    std::atomic<int> full = 0, wrong = 0;
    run_ranks(2, [&](ProcessGroup& group) {
        CheckpointDirectory checkpoints(place, {.asynchronous = true});
        save_step(group, checkpoints, 1);
        if (group.rank() == 0 && !leave_room(place, pages, files)) ++wrong;
        group.barrier().wait();
        try {
            save_step(group, checkpoints, 2);
        } catch (const ddp::FileError& error) {
            ++(std::string(error.what()).find("No space left on device") == std::string::npos ? wrong : full);
        }
    });
    if (wrong > 0 || full == 1) return 2;
    return whole_step_in(place) == (full > 0 ? 1U : 2U) ? full / 2 : 3;
}

TEST(AsynchronousCheckpoint, IsWholeWhenTheDiskIsFullAtAnyPointOfASave) {
    const TemporaryDirectory temporary;
    fill_disks(8, [&](int pages, int files) { return save_on_a_small_disk(temporary.path(), pages, files); });
}

TEST(AsynchronousCheckpoint, IsWholeWhenItsWritersAreKilledAtAnySystemCall) {
    for (const bool has_rename_flags : {true, false}) {
        const TemporaryDirectory place;
        bool finished = false;
        int kills = 1;
        for (; !finished && kills < 20'000; kills += 11) {
            run_ranks(2, [&](ProcessGroup& group) {
                CheckpointDirectory checkpoints(place.path(), {.keep = 1});
                save_step(group, checkpoints, 1);  // also removes files of the killed writers
            });
            EXPECT_EQ(names_in(place.path()), (std::vector<std::string>{"latest", "step-000001"}));
            finished = finishes_before_stop(kills, [&] {
                if (!has_rename_flags) refuse_flags_of_rename();
                run_ranks(2, [&](ProcessGroup& group) {
                    if (group.rank() == 0) start_counting();
                    CheckpointDirectory checkpoints(place.path(), {.asynchronous = true});
                    save_step(group, checkpoints, 2);
                });
            });
            const std::uint64_t step = whole_step_in(place.path());
            EXPECT_TRUE(step == 2 || (step == 1 && !finished)) << step << " after " << kills;
        }
        EXPECT_TRUE(finished);
        EXPECT_GT(kills, 100) << "they were killed at many different calls";
    }
}

}  // namespace
