#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "ddp/checkpoint.h"
#include "env/io/socket.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/interrupted.h"

namespace {

namespace fs = std::filesystem;
using ddp::CheckpointDirectory;
using ddp::Tensor;
using ddp::TrainingState;
using ddprun::test::TemporaryDirectory;
using namespace ddp::testing;

struct Job {
    std::vector<float> weights, momentum;
    explicit Job(float value, std::size_t count = 100) : weights(count, value), momentum(count, -value) {}
    std::vector<Tensor> model() {
        return {ddp::tensor_of("w", std::span(weights), {static_cast<std::int64_t>(weights.size())})};
    }
    std::vector<Tensor> optimizer() {
        return {
            ddp::tensor_of("momentum.w", std::span(momentum), {static_cast<std::int64_t>(momentum.size())})};
    }
    std::string save(CheckpointDirectory& directory, std::uint64_t step) {
        return directory.save(model(), optimizer(), {step / 10, step, {step / 10, 3}, {{"run", "r1"}}});
    }
};

/// Saves as a run of its own, which ends.
std::string save_once(const std::string& path, float value, std::uint64_t step,
                      const ddp::CheckpointOptions& options = {}) {
    CheckpointDirectory directory(path, options);
    return Job(value).save(directory, step);
}

TEST(Checkpoint, RestoresTensorsAndState) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.file("deep/er"));
    Job saved(1.5F);
    const std::string path = saved.save(directory, 40);
    EXPECT_EQ(path, temporary.file("deep/er/step-000040"));
    EXPECT_EQ(directory.latest(), path);

    Job loaded(0);
    const TrainingState state = ddp::load_checkpoint(path, loaded.model(), loaded.optimizer());
    EXPECT_EQ(state, (TrainingState{4, 40, {4, 3}, {{"run", "r1"}}}));
    EXPECT_EQ(loaded.weights, saved.weights);
    EXPECT_EQ(loaded.momentum, saved.momentum);
}

TEST(Checkpoint, IsAbsentInAnEmptyOrMissingDirectory) {
    const TemporaryDirectory temporary;
    EXPECT_EQ(CheckpointDirectory(temporary.path()).latest(), std::nullopt);
    EXPECT_EQ(CheckpointDirectory(temporary.file("absent")).latest(), std::nullopt);
}

TEST(Checkpoint, KeepsOnlyTheNewestAndNoTemporaryNames) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path(), {.keep = 2});
    for (const std::uint64_t step : {10U, 20U, 30U, 40U}) Job(1).save(directory, step);
    EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000030", "step-000040"}));
}

TEST(Checkpoint, IsNewerThanAnOldRunsInSpiteOfALowerStep) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path(), {.keep = 1});
    Job(1).save(directory, 900);
    const std::string newest = Job(2).save(directory, 10);
    EXPECT_EQ(directory.latest(), newest);
    EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000010"}));
}

TEST(Checkpoint, ReplacesTheOneOfTheSameStep) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    Job(1).save(directory, 10);
    const std::string path = Job(2).save(directory, 10);
    Job loaded(0);
    ddp::load_checkpoint(path, loaded.model(), loaded.optimizer());
    EXPECT_EQ(loaded.weights[0], 2);
    EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000010"}));
}

TEST(Checkpoint, NamesTheTensorAndBothShapesOfAnotherModelAndChangesNothing) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const std::string path = Job(1, 100).save(directory, 10);
    Job other(5, 60);
    try {
        ddp::load_checkpoint(path, other.model(), other.optimizer());
        FAIL();
    } catch (const ddp::InvalidInput& error) {
        EXPECT_EQ(error.what(),
                  path + "/model.safetensors: tensor 'w' is float32[100] there, float32[60] in this program");
    }
    EXPECT_EQ(other.weights[0], 5);
}

TEST(Checkpoint, ChangesNothingForAnotherOptimizer) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const std::string path = Job(1).save(directory, 10);
    Job other(5);
    EXPECT_THROW(ddp::load_checkpoint(path, other.model(), {}), ddp::InvalidInput);
    EXPECT_EQ(other.weights[0], 5);
}

TEST(Checkpoint, IsRefusedByNameWithABrokenState) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const std::string path = Job(1).save(directory, 10);
    std::string whole;
    std::getline(std::ifstream(path + "/state.json"), whole, '\0');
    for (std::size_t length = 0; length + 2 < whole.size(); ++length) {
        std::ofstream(path + "/state.json", std::ios::trunc) << whole.substr(0, length);
        EXPECT_THROW(ddp::load_state(path), ddp::InvalidInput) << length;
    }
    fs::remove(path + "/state.json");
    EXPECT_THROW(ddp::load_state(path), ddp::InvalidInput);
}

TEST(Checkpoint, LatestMustNameACheckpointInsideTheDirectory) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    Job(1).save(directory, 10);
    for (const char* name : {"step-000099", "../../etc", "step-", ""}) {
        std::ofstream(temporary.file("latest"), std::ios::trunc) << name << "\n";
        EXPECT_THROW(static_cast<void>(directory.latest()), ddp::InvalidInput) << name;
    }
}

TEST(Checkpoint, IsFoundWhenTheWriterDiedBeforeItWroteLatest) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const std::string path = Job(1).save(directory, 10);
    fs::remove(temporary.file("latest"));
    EXPECT_EQ(directory.latest(), path);
}

std::string refusal_of_state(const std::string& checkpoint) {
    try {
        ddp::load_state(checkpoint);
    } catch (const ddp::InvalidInput& error) {
        return error.what();
    }
    return "accepted";
}

TEST(Checkpoint, RefusesHugeCountsBeforeTheyOverflow) {
    const TemporaryDirectory temporary;
    const auto with = [&](const std::string& step, const std::string& consumed) {
        std::ofstream(temporary.file("state.json"))
            << R"({"format":1,"epoch":1,"step":)" << step << R"(,"sampler":{"epoch":1,"consumed":)"
            << consumed << "}}";
        return refusal_of_state(temporary.path());
    };
    const std::string prefix =
        "checkpoint " + temporary.file("state.json") + ": not the state of a checkpoint";
    EXPECT_EQ(with("7", "3"), "accepted");
    EXPECT_EQ(with("18446744073709551615", "3"), prefix + ": the count 18446744073709551615 is too large");
    EXPECT_EQ(with("7", "18446744073709551615"), prefix + ": the count 18446744073709551615 is too large");
    EXPECT_EQ(with("18446744073709551616", "3"), prefix);
    EXPECT_EQ(with("-1", "3"), prefix);
    EXPECT_EQ(with("1e400", "3"), prefix);
}

TEST(Checkpoint, RefusesPipesInsteadOfFilesWithoutWaiting) {
    const TemporaryDirectory temporary;
    ASSERT_EQ(::mkfifo(temporary.file("state.json").c_str(), 0600), 0);
    ASSERT_EQ(::mkfifo(temporary.file("latest").c_str(), 0600), 0);
    EXPECT_EQ(refusal_of_state(temporary.path()),
              "checkpoint " + temporary.file("state.json") + ": is a pipe, not a file");
    EXPECT_THROW((void)CheckpointDirectory(temporary.path()).latest(), ddp::InvalidInput);
}

TEST(Checkpoint, KeepsTheLastOneWhenTheDiskIsFull) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const std::string good = save_once(temporary.path(), 1, 10);
    // A limit on file sizes makes write() fail as on a full disk; it runs in a child because the limit cannot
    // be raised again.
    const pid_t child = start_child([&] {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{4096, 4096};
        if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
        try {
            Job(2, 10'000).save(directory, 20);
        } catch (const ddp::Error& error) {
            const bool names_the_cause =
                std::string(error.what()).find("write: File too large") != std::string::npos;
            ::_exit(names_the_cause ? 7 : 3);
        }
    });
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 7);
    EXPECT_EQ(directory.latest(), good);
    EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000010"}));
    Job loaded(0);
    ddp::load_checkpoint(good, loaded.model(), loaded.optimizer());
    EXPECT_EQ(loaded.weights[0], 1);
}

/// Saves one checkpoint with enough space, then one with only that many pages and files free. 0: both exist;
/// 1: the second failed because of the full disk, and the first is intact; any other number is a failure.
int save_on_a_small_disk(const std::string& place, int pages, int files) {
    if (!mount_small_disk(place)) return kNotAllowed;
    CheckpointDirectory directory(place);
    Job(1).save(directory, 1);
    if (!leave_room(place, pages, files)) return 2;
    bool failed = false;
    try {
        Job(2).save(directory, 2);
    } catch (const ddp::FileError& error) {
        failed = std::string(error.what()).find("No space left on device") != std::string::npos;
        if (!failed) return 3;
    }
    const auto latest = directory.latest();
    if (!latest) return 4;
    Job loaded(0);
    const TrainingState state = ddp::load_checkpoint(*latest, loaded.model(), loaded.optimizer());
    const auto value = static_cast<float>(state.step);
    if (loaded.weights != std::vector<float>(100, value) ||
        loaded.momentum != std::vector<float>(100, -value))
        return 5;
    return failed ? 1 : 0;
}

TEST(Checkpoint, IsWholeWhenTheDiskIsFullAtAnyPointOfASave) {
    const TemporaryDirectory temporary;
    fill_disks(6, [&](int pages, int files) { return save_on_a_small_disk(temporary.path(), pages, files); });
}

TEST(Checkpoint, NamesADirectoryThatCannotBeMade) {
    const TemporaryDirectory temporary;
    std::ofstream(temporary.file("file")) << "x";
    CheckpointDirectory directory(temporary.file("file/below"));
    try {
        Job(1).save(directory, 10);
        FAIL();
    } catch (const ddp::Error& error) {
        EXPECT_NE(std::string(error.what()).find(temporary.file("file/below")), std::string::npos)
            << error.what();
    }
}

/// The common value in the newest checkpoint.
float value_in(const CheckpointDirectory& directory) {
    Job loaded(0);
    ddp::load_checkpoint(directory.latest().value(), loaded.model(), loaded.optimizer());
    const float value = loaded.weights[0];
    EXPECT_EQ(loaded.weights, std::vector<float>(100, value));
    EXPECT_EQ(loaded.momentum, std::vector<float>(100, -value));
    return value;
}

TEST(Checkpoint, ReplacesTheOneOfTheSameStepWithoutRenameFlags) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    const pid_t child = start_child([&] {
        refuse_flags_of_rename();
        for (const float value : {1.0F, 2.0F}) Job(value).save(directory, 10);
    });
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "no seccomp filters here";
    EXPECT_EQ(status, 0);
    EXPECT_EQ(value_in(directory), 2);
    EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000010"}));
}

TEST(Checkpoint, IsWholeWhenAReplacingWriterIsKilledAtAnySystemCall) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path());
    bool finished = false;
    int kills = 40, left_aside = 0;  // the test below covers the earlier calls
    for (; !finished && kills < 1000; ++kills) {
        save_once(temporary.path(), 1, 1, {.keep = 1});  // also removes files of the killed writer
        EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000001"}));
        // Also without `latest`, which does not exist when the very first save is killed.
        if (kills % 4 >= 2) fs::remove(temporary.file("latest"));
        finished = finishes_before_stop(kills, [&] {
            refuse_flags_of_rename();
            start_counting();
            Job(2).save(directory, 1);
        });
        const float value = value_in(directory);
        EXPECT_TRUE(value == 2 || (value == 1 && !finished)) << value;
        left_aside += fs::exists(temporary.file("step-000001")) ? 0 : 1;
    }
    EXPECT_TRUE(finished);
    EXPECT_GT(left_aside, 0);
}

TEST(Checkpoint, IsWholeWhenItsWriterIsKilledAtAnySystemCall) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.path(), {.keep = 1});
    bool finished = false;
    int kills = 1;
    for (; !finished && kills < 1000; ++kills) {
        save_once(temporary.path(), 1, 1, {.keep = 1});  // also removes files of the killed writer
        EXPECT_EQ(names_in(temporary.path()), (std::vector<std::string>{"latest", "step-000001"}));
        finished = finishes_before_stop(kills, [&] {
            start_counting();
            Job(2).save(directory, 2);
        });

        const auto latest = directory.latest();
        ASSERT_TRUE(latest);
        Job loaded(0);
        const TrainingState state = ddp::load_checkpoint(*latest, loaded.model(), loaded.optimizer());
        const auto value = static_cast<float>(state.step);
        EXPECT_EQ(loaded.weights, std::vector<float>(100, value));
        EXPECT_EQ(loaded.momentum, std::vector<float>(100, -value));
        EXPECT_TRUE(!finished || state.step == 2);
    }
    EXPECT_TRUE(finished);
    EXPECT_GT(kills, 40);  // it was killed at many different calls
}

/// A run that has saved step 1 into `path` and lives until it is killed.
class LivingWriter {
  public:
    explicit LivingWriter(const std::string& path, const std::function<void()>& prepare = {}) {
        int ready[2] = {-1, -1};
        EXPECT_EQ(::pipe(ready), 0);
        pid_ = start_child([&] {
            if (prepare) prepare();
            CheckpointDirectory directory(path);
            Job(1).save(directory, 1);
            ::close(ready[0]), ::close(ready[1]);
            for (;;) ::pause();
        });
        ::close(ready[1]);
        char none = 0;
        EXPECT_EQ(::read(ready[0], &none, 1), 0);  // the child has closed its end
        ::close(ready[0]);
    }
    ~LivingWriter() { kill(); }
    LivingWriter(const LivingWriter&) = delete;
    LivingWriter& operator=(const LivingWriter&) = delete;
    void kill() {
        if (pid_ <= 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = -1;
    }
    [[nodiscard]] pid_t pid() const { return pid_; }

  private:
    pid_t pid_ = -1;
};

/// An unfinished checkpoint such as a writer has in `path` while it saves.
std::string make_unfinished(const std::string& path) {
    std::string unfinished = path + "/.writing-0123456789abcdef-step-000007";
    fs::create_directory(unfinished);
    std::ofstream(unfinished + "/model.safetensors.part") << "x";
    return unfinished;
}

std::string refusal_of_save(const std::string& path) {
    try {
        save_once(path, 2, 2);
    } catch (const ddp::FileError& error) {
        return error.what();
    }
    return "saved";
}

std::string refusal_beside(const std::string& path, pid_t writer) {
    return "checkpoint " + path + ": another run (on " + ddprun::host_name() + ", pid " +
           std::to_string(writer) + ") saves here: give each run its own directory";
}

TEST(Checkpoint, IsRefusedWhereAnotherRunSavesAndTouchesNoneOfItsFiles) {
    const TemporaryDirectory temporary;
    const LivingWriter writer(temporary.path());
    const std::string unfinished = make_unfinished(temporary.path());
    EXPECT_EQ(refusal_of_save(temporary.path()), refusal_beside(temporary.path(), writer.pid()));
    EXPECT_TRUE(fs::exists(unfinished + "/model.safetensors.part"));
    EXPECT_EQ(value_in(CheckpointDirectory(temporary.path())), 1) << "reading is free";
    EXPECT_EQ(refusal_of_save(temporary.path()), refusal_beside(temporary.path(), writer.pid()));
}

TEST(Checkpoint, IsFreeAtOnceWhenItsWriterIsKilledThoughAChildOfItLives) {
    const TemporaryDirectory temporary;
    const std::string alive = temporary.file("alive");
    ASSERT_EQ(::mkfifo(alive.c_str(), 0600), 0);
    CheckpointDirectory directory(temporary.file("run"));
    const pid_t writer = start_child([&] {
        Job(1).save(directory, 1);
        if (::fork() == 0) {
            const int until_closed = ::open(alive.c_str(), O_RDONLY);
            char none = 0;
            static_cast<void>(!::read(until_closed, &none, 1));
            ::_exit(0);
        }
        for (;;) ::pause();
    });
    const int child = ::open(alive.c_str(), O_WRONLY);  // waits for the writer's child
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    make_unfinished(temporary.file("run"));
    EXPECT_EQ(refusal_of_save(temporary.file("run")), "saved");
    EXPECT_EQ(names_in(temporary.file("run")),
              (std::vector<std::string>{"latest", "step-000001", "step-000002"}));
    ::close(child);
}

TEST(Checkpoint, HasNoWriterOnceItsRunHasEnded) {
    const TemporaryDirectory temporary;
    {
        CheckpointDirectory directory(temporary.path());
        Job(1).save(directory, 1);
        EXPECT_TRUE(fs::exists(temporary.file(".writer")));
        // A forked child that ends has the object as well.
        int status = -1;
        ::waitpid(start_child([&] { directory.~CheckpointDirectory(); }), &status, 0);
        EXPECT_EQ(status, 0);
        EXPECT_TRUE(fs::exists(temporary.file(".writer")));
    }
    EXPECT_FALSE(fs::exists(temporary.file(".writer")));
}

TEST(Checkpoint, IsSavedAgainByARunWhoseDirectoryWasDeleted) {
    const TemporaryDirectory temporary;
    CheckpointDirectory directory(temporary.file("run"));
    Job(1).save(directory, 1);
    fs::remove_all(temporary.file("run"));
    const std::string path = Job(2).save(directory, 2);
    EXPECT_EQ(directory.latest(), path);
    EXPECT_TRUE(fs::exists(temporary.file("run/.writer")));
}

/// Runs `body` in a child with these variables, as a process of ddprun's job "ten"; its exit status.
template <class Body>
int in_job(const char* token, Body body) {
    const pid_t child = start_child([&] {
        ::setenv("DDPRUN_TOKEN", token, 1);
        ::setenv("TORCHELASTIC_RUN_ID", "ten", 1);
        body();
    });
    int status = -1;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Checkpoint, IsInheritedFromALostHostByTheSameJobOnly) {
    const TemporaryDirectory temporary;
    // The kernel of this host holds the lock, in the name of another host's process.
    const LivingWriter writer(temporary.path(), [] {
        ::setenv("DDPRUN_TOKEN", "secret", 1);
        ::setenv("TORCHELASTIC_RUN_ID", "ten", 1);
    });
    std::string line;
    std::getline(std::ifstream(temporary.file(".writer")), line);
    const std::string own = "\"" + ddprun::host_name() + "\"";
    ASSERT_NE(line.find(own), std::string::npos) << line;
    std::ofstream(temporary.file(".writer")) << line.replace(line.find(own), own.size(), "\"lost\"");
    const auto expect_refusal = [&] {
        const std::string refusal = refusal_of_save(temporary.path());
        EXPECT_NE(refusal.find("another run (job ten on lost, pid "), std::string::npos) << refusal;
        return ::testing::Test::HasFailure() ? 1 : 0;
    };
    EXPECT_EQ(in_job("another", [&] { ::_exit(expect_refusal()); }), 0);
    EXPECT_EQ(in_job("secret", [&] { ::_exit(refusal_of_save(temporary.path()) == "saved" ? 0 : 1); }), 0);
}

TEST(Checkpoint, WaitsForAProcessOfTheSameJobThatIsAboutToEnd) {
    const TemporaryDirectory temporary;
    LivingWriter writer(temporary.path(), [] {
        ::setenv("DDPRUN_TOKEN", "secret", 1);
        ::setenv("TORCHELASTIC_RUN_ID", "ten", 1);
    });
    int begins[2] = {-1, -1};
    ASSERT_EQ(::pipe(begins), 0);
    const pid_t next = start_child([&] {
        ::setenv("DDPRUN_TOKEN", "secret", 1);
        ::setenv("TORCHELASTIC_RUN_ID", "ten", 1);
        ::close(begins[0]), ::close(begins[1]);
        ::_exit(refusal_of_save(temporary.path()) == "saved" ? 0 : 1);
    });
    ::close(begins[1]);
    char none = 0;
    EXPECT_EQ(::read(begins[0], &none, 1), 0);  // it is about to save
    ::close(begins[0]);
    writer.kill();
    int status = -1;
    ::waitpid(next, &status, 0);
    EXPECT_EQ(status, 0);
}

TEST(Checkpoint, SparesAndNamesOtherRunsWithoutLocks) {
    const TemporaryDirectory temporary;
    int status = -1;
    ::waitpid(
        start_child([&] {
            refuse_locks();
            LivingWriter writer(temporary.path());
            const std::string expected = refusal_beside(temporary.path(), writer.pid());
            EXPECT_EQ(refusal_of_save(temporary.path()), expected) << "a process of this host";
            writer.kill();
            const std::string unfinished = make_unfinished(temporary.path());
            EXPECT_EQ(refusal_of_save(temporary.path()), "saved");
            EXPECT_TRUE(fs::exists(unfinished)) << "another host's writer may be at it";

            std::ofstream(temporary.file(".writer")) << R"({"run":"a","job":"4711","host":"far","pid":7})";
            ::testing::internal::CaptureStderr();
            CheckpointDirectory directory(temporary.path());
            for (const std::uint64_t step : {3U, 4U}) Job(3).save(directory, step);
            EXPECT_EQ(::testing::internal::GetCapturedStderr(),
                      "ddp: checkpoint " + temporary.path() +
                          ": another run (job 4711 on far, pid 7) saved here last, and this file system has "
                          "no locks, which would show whether it goes on: give each run its own directory\n");
            EXPECT_EQ(names_in(temporary.path()),
                      (std::vector<std::string>{".writing-0123456789abcdef-step-000007", "latest",
                                                "step-000003", "step-000004"}));
            ::_exit(::testing::Test::HasFailure() ? 1 : 0);
        }),
        &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "no seccomp filters here";
    EXPECT_EQ(status, 0);
}

}  // namespace
