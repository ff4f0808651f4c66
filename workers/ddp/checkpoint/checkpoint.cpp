#include "ddp/checkpoint.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/cuda/host_copies.h"
#include "env/io/file.h"
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
constexpr std::size_t kLatestBytesLimit = 4096;

[[noreturn]] void fail_checkpoint(const std::string& path, const char* attempt, int error = errno) {
    throw FileError(fmt::format("checkpoint {}: {}: {}", path, attempt, std::strerror(error)));
}

bool is_checkpoint_name(std::string_view name) {
    const std::string_view digits = name.substr(std::min(name.size(), kPrefix.size()));
    return name.substr(0, kPrefix.size()) == kPrefix && !digits.empty() &&
           digits.find_first_not_of("0123456789") == std::string_view::npos;
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

void write_parts(const std::string& directory, std::span<const CheckpointPart> parts,
                 const TrainingState& state, const std::shared_ptr<cuda::HostScratch>& scratch) {
    // "pt" tells other programs the layout of the tensors.
    const Metadata metadata = {{"format", "pt"}, {"step", std::to_string(state.step)}};
    for (const CheckpointPart& part : parts) {
        const cuda::HostCopies values(part.tensors, cuda::HostCopies::Begin::WithContents, scratch);
        write_safetensors(path_of(directory, part.name), values.tensors(), metadata);
    }
    replace_file(directory + "/state.json", to_json(state));
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(std::string path, std::size_t keep)
    : path_(std::move(path)), keep_(keep), scratch_(std::make_shared<cuda::HostScratch>()) {
    if (path_.empty()) throw InvalidInput("checkpoint: the directory has no name");
}

std::string CheckpointDirectory::save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                                      const TrainingState& state) {
    const std::vector<CheckpointPart> parts = {{kModelPart, {model.begin(), model.end()}},
                                               {kOptimizerPart, {optimizer.begin(), optimizer.end()}}};
    return write(parts, state);
}

std::string CheckpointDirectory::write(std::span<const CheckpointPart> parts, const TrainingState& state) {
    std::error_code error;
    fs::create_directories(path_, error);
    if (error) fail_checkpoint(path_, "mkdir", error.value());
    remove_left_overs();

    const std::string name = fmt::format("{}{:06}", kPrefix, state.step);
    const std::string hidden = fmt::format("{}/{}{}", path_, kHiddenPrefix, name);
    const std::string final_path = path_ + "/" + name;
    if (::mkdir(hidden.c_str(), 0777) != 0) fail_checkpoint(hidden, "mkdir");
    try {
        write_parts(hidden, parts, state, scratch_);
        move_into_place(hidden, path_, name);
    } catch (...) {
        fs::remove_all(hidden, error);
        throw;
    }
    sync_directory(path_);
    remove_left_overs();  // removes the replaced checkpoint
    replace_file(path_ + "/latest", name + "\n");
    remove_old(name);
    return final_path;
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
        if (is_replaced || name.starts_with(kHiddenPrefix)) fs::remove_all(entry, ignored);
    }
    ::unlink(DurableFile::unfinished(path_ + "/latest").c_str());
}

void CheckpointDirectory::remove_old(const std::string& newest) const {
    if (keep_ == 0) return;
    std::error_code ignored;
    // Sort by time, not by step: a new run in an old directory starts again at low steps.
    std::vector<std::pair<fs::file_time_type, fs::path>> others;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) {
        const std::string name = entry.path().filename();
        if (name != newest && is_checkpoint_name(name))
            others.emplace_back(entry.last_write_time(ignored), entry.path());
    }
    std::sort(others.begin(), others.end(), std::greater<>());
    for (std::size_t i = keep_ - 1; i < others.size(); ++i) fs::remove_all(others[i].second, ignored);
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
