#include "ddp/checkpoint.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/checkpoint/save.h"
#include "ddp/checkpoint/shards.h"
#include "ddp/checkpoint/writer_lock.h"
#include "ddp/cuda/host_copies.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/error_text.h"
#include "env/io/background_call.h"
#include "env/io/file.h"
#include "env/print.h"
#include "env/text.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;
using ddprun::Result;

constexpr std::string_view kPrefix = "step-";
/// Name prefix of an unfinished checkpoint; hidden, so that neither `ls` nor latest() takes it for a
/// checkpoint.
constexpr std::string_view kHiddenPrefix = ".writing-";
/// Name prefix of a checkpoint while another of its step replaces it on a file system that cannot exchange
/// them.
constexpr std::string_view kAsidePrefix = ".replaced-";
/// The random name of a save, in hexadecimal digits, stands between kHiddenPrefix and '-'.
constexpr std::size_t kSaveNameDigits = 16;
constexpr std::size_t kLatestBytesLimit = 4096;

[[noreturn]] void fail_checkpoint(const std::string& path, const char* attempt, int error = errno) {
    throw FileError(fmt::format("checkpoint {}: {}: {}", path, attempt, std::strerror(error)));
}

bool is_checkpoint_name(std::string_view name) {
    const std::string_view digits = name.substr(std::min(name.size(), kPrefix.size()));
    return name.substr(0, kPrefix.size()) == kPrefix && !digits.empty() &&
           digits.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Removes a directory while other ranks may still remove their files in it, which makes a try fail.
void remove_tree(const fs::path& path) {
    std::error_code error;
    for (int tries = 0; tries < 10; ++tries) {
        fs::remove_all(path, error);
        if (!error) return;
    }
}

/// "step-000750", the name that the checkpoint `hidden` gets.
std::string name_of_hidden(const std::string& hidden) {
    return fs::path(hidden).filename().string().substr(kHiddenPrefix.size() + kSaveNameDigits + 1);
}

/// Finds the checkpoint of the name `path`: there, or set aside when the writer was killed while it replaced
/// it. "" without one.
std::string find_checkpoint(const std::string& path) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) return path;
    const fs::path whole(path);
    std::string aside = whole.parent_path() / (std::string(kAsidePrefix) + whole.filename().string());
    return fs::is_directory(aside, ignored) ? aside : "";
}

/// Renames the directory `hidden` to `directory`/`name` in one step, exchanging the two when `name` exists.
/// File systems without renameat2's flags (NFS, Lustre: EINVAL) take two steps; find_checkpoint() handles the
/// state in between.
void move_into_place(const std::string& hidden, const std::string& directory, const std::string& name) {
    const std::string to = directory + "/" + name,
                      aside = fmt::format("{}/{}{}", directory, kAsidePrefix, name);
    const auto rename_with = [&](unsigned flags) {
        return ::renameat2(AT_FDCWD, hidden.c_str(), AT_FDCWD, to.c_str(), flags) == 0;
    };
    if (rename_with(RENAME_NOREPLACE)) return;
    if (errno == EINVAL && ::rename(hidden.c_str(), to.c_str()) == 0) return;
    if (errno != EEXIST && errno != ENOTEMPTY) fail_checkpoint(to, "rename");
    if (rename_with(RENAME_EXCHANGE)) return;
    if (errno != EINVAL || ::rename(to.c_str(), aside.c_str()) != 0) fail_checkpoint(to, "rename");
    if (::rename(hidden.c_str(), to.c_str()) == 0) return;
    const int error = errno;
    ::rename(aside.c_str(), to.c_str());
    fail_checkpoint(to, "rename", error);
}

}  // namespace

std::string published_path(const std::string& hidden) {
    return fs::path(hidden).parent_path() / name_of_hidden(hidden);
}

std::string save_name_of(const std::string& hidden) {
    return fs::path(hidden).filename().string().substr(kHiddenPrefix.size(), kSaveNameDigits);
}

Metadata metadata_of(std::uint64_t step) {
    // "pt" tells other programs the layout of the tensors.
    return {{"format", "pt"}, {"step", std::to_string(step)}};
}

CheckpointSave::~CheckpointSave() {
    files.clear();
    if (publishes && !hidden.empty()) remove_tree(hidden);
}

void CheckpointSave::copy(const std::shared_ptr<cuda::HostScratch>& scratch) {
    std::vector<Tensor> originals;
    for (const File& file : files) {
        if (!file.is_copy) originals.insert(originals.end(), file.tensors.begin(), file.tensors.end());
    }
    const cuda::HostCopies copies(originals, cuda::HostCopies::Begin::WithContents, scratch,
                                  cuda::HostCopies::Of::All);
    auto next = copies.tensors().begin();
    for (File& file : files) {
        if (file.is_copy) continue;
        for (Tensor& tensor : file.tensors) tensor = *next++;
    }
    on_device.reset();
}

void CheckpointSave::create() {
    for (File& file : files) file.file = std::make_unique<DurableFile>(file.path);
}

void CheckpointSave::write(const std::shared_ptr<cuda::HostScratch>& scratch) {
    for (File& file : files) {
        const cuda::HostCopies values(file.tensors, cuda::HostCopies::Begin::WithContents, scratch);
        write_safetensors(*file.file, values.tensors(), file.metadata);
    }
}

void CheckpointSave::wait_for_others() const {
    constexpr std::chrono::milliseconds kBetweenLooks{20};
    const auto deadline = std::chrono::steady_clock::now() + kFileTimeout;
    for (const auto& [rank, path] : awaited) {
        std::error_code ignored;
        const auto fail = [rank = rank, &path = path](const char* what) {
            throw OtherRankFailed(rank, fmt::format("checkpoint {}: rank {} {}", path, rank, what));
        };
        while (fs::exists(DurableFile::unfinished(path), ignored)) {
            if (std::chrono::steady_clock::now() > deadline) fail("has not written it within an hour");
            std::this_thread::sleep_for(kBetweenLooks);
        }
        if (!fs::exists(path, ignored)) fail("could not write it");
    }
}

CheckpointDirectory::CheckpointDirectory(std::string path, CheckpointOptions options)
    : path_(std::move(path)),
      options_(options),
      copies_(std::make_shared<cuda::HostScratch>()),
      gathered_(std::make_shared<cuda::HostScratch>()) {
    if (path_.empty()) throw InvalidInput("checkpoint: the directory has no name");
}

CheckpointDirectory::~CheckpointDirectory() {
    try {
        if (pending_.valid()) pending_.get();
    } catch (const std::exception& error) {
        ddprun::print(stderr, "ddp: {}\n", with_rank(error.what()));
    }
}

std::string CheckpointDirectory::save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                                      const TrainingState& state) {
    if (pending_.valid()) pending_.get();
    CheckpointSave save;
    save.publishes = true;
    save.hidden = begin(state.step);
    const Metadata metadata = metadata_of(state.step);
    save.files.push_back({path_of(save.hidden, kModelPart), {model.begin(), model.end()}, metadata});
    save.files.push_back(
        {path_of(save.hidden, kOptimizerPart), {optimizer.begin(), optimizer.end()}, metadata});
    save.texts.emplace_back(state_path_of(save.hidden), to_json(state));
    save.create();
    save.write(copies_);
    publish(save);
    return published_path(save.hidden);
}

void CheckpointDirectory::hold() {
    std::error_code error;
    fs::create_directories(path_, error);
    if (error) fail_checkpoint(path_, "mkdir", error.value());
    if (!writer_) writer_ = std::make_unique<WriterLock>(path_);
    writer_->hold();
}

std::string CheckpointDirectory::begin(std::uint64_t step) {
    hold();
    remove_left_overs();
    // A writer of this run's last generation that still lives finds its directory gone, not this one.
    std::random_device random;
    std::string hidden =
        fmt::format("{}/{}{:08x}{:08x}-{}{:06}", path_, kHiddenPrefix, random(), random(), kPrefix, step);
    if (::mkdir(hidden.c_str(), 0777) != 0) fail_checkpoint(hidden, "mkdir");
    return hidden;
}

void CheckpointDirectory::publish(const CheckpointSave& save, const std::function<void()>& may_go_on) const {
    for (const auto& [path, content] : save.texts) replace_file(path, content);
    sync_directory(save.hidden);
    const std::string name = name_of_hidden(save.hidden);
    move_into_place(save.hidden, path_, name);
    sync_directory(path_);
    remove_left_overs();  // removes the replaced checkpoint
    if (may_go_on) may_go_on();
    replace_file(path_ + "/latest", name + "\n");
    remove_old(name);
}

void CheckpointDirectory::write_in_background(std::unique_ptr<CheckpointSave> save) {
    const auto task = std::make_shared<std::packaged_task<void()>>([this, given = std::move(save)]() mutable {
        const trace::Scope traced(trace::TraceKind::Checkpoint, "write in the background");
        const std::unique_ptr<CheckpointSave> own = std::move(given);
        own->write(copies_);
        if (!own->publishes) return;
        own->wait_for_others();
        publish(*own);
    });
    pending_ = task->get_future();
    auto thread = ddprun::start_thread("start a thread", [task] {
        // The training threads go first: on busy cores this one gets a few percent of a core.
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
        (*task)();
    });
    if (thread) thread->detach();
    else (*task)();
}

void CheckpointDirectory::remove_left_overs() const {
    std::error_code ignored;
    std::vector<fs::path> entries;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) entries.push_back(entry.path());
    for (const fs::path& entry : entries) {
        const std::string name = entry.filename();
        // A checkpoint that was set aside and not replaced is still valid, and gets its name back.
        const bool is_replaced =
            name.starts_with(kAsidePrefix) &&
            ::rename(entry.c_str(), (path_ + "/" + name.substr(kAsidePrefix.size())).c_str()) != 0 &&
            (errno == EEXIST || errno == ENOTEMPTY);
        const bool is_left_over = name.starts_with(kHiddenPrefix) && writer_->is_left_over(entry);
        if (is_replaced || is_left_over) remove_tree(entry);
    }
    const std::string unfinished = DurableFile::unfinished(path_ + "/latest");
    if (writer_->is_left_over(unfinished)) ::unlink(unfinished.c_str());
}

void CheckpointDirectory::remove_old(const std::string& newest) const {
    if (options_.keep == 0) return;
    std::error_code ignored;
    // Sort by time, not by step: a new run in an old directory starts again at low steps.
    std::vector<std::pair<fs::file_time_type, fs::path>> others;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) {
        const std::string name = entry.path().filename();
        if (name != newest && is_checkpoint_name(name))
            others.emplace_back(entry.last_write_time(ignored), entry.path());
    }
    std::sort(others.begin(), others.end(), std::greater<>());
    for (std::size_t i = options_.keep - 1; i < others.size(); ++i) fs::remove_all(others[i].second, ignored);
}

std::optional<std::string> CheckpointDirectory::latest() const {
    std::error_code ignored;
    const Result<std::string> latest = ddprun::read_regular_file(path_ + "/latest", kLatestBytesLimit);
    if (latest) {
        const std::string name = latest->substr(0, latest->find('\n'));
        const std::string found = is_checkpoint_name(name) ? find_checkpoint(path_ + "/" + name) : "";
        if (found.empty())
            throw InvalidInput(
                fmt::format("checkpoint {}/latest: names '{}', which is not a checkpoint there", path_,
                            ddprun::excerpt(name)));
        return found;
    }
    if (latest.error().sys != ENOENT) throw InvalidInput("checkpoint " + latest.error().what);
    // A save that was killed before it wrote `latest` may have left a complete checkpoint under its name.
    std::optional<std::pair<fs::file_time_type, std::string>> newest;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) {
        const std::string file = entry.path().filename();
        const std::string name = file.starts_with(kAsidePrefix) ? file.substr(kAsidePrefix.size()) : file;
        // A checkpoint set aside whose successor is in place is being removed.
        if (!is_checkpoint_name(name) || find_checkpoint(path_ + "/" + name) != entry.path()) continue;
        std::pair<fs::file_time_type, std::string> found{entry.last_write_time(ignored),
                                                         entry.path().string()};
        if (!newest || found > *newest) newest = std::move(found);
    }
    if (!newest) return std::nullopt;
    return newest->second;
}

}  // namespace ddp
