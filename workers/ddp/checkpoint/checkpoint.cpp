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
/// Hidden, so that neither `ls` nor latest() takes it for a checkpoint.
constexpr std::string_view kHiddenPrefix = ".writing-";
constexpr std::size_t kLatestBytesLimit = 4096;

[[noreturn]] void fail_checkpoint(const std::string& path, const char* attempt, int error = errno) {
    throw FileError(fmt::format("checkpoint {}: {}: {}", path, attempt, std::strerror(error)));
}

bool is_checkpoint_name(std::string_view name) {
    const std::string_view digits = name.substr(std::min(name.size(), kPrefix.size()));
    return name.substr(0, kPrefix.size()) == kPrefix && !digits.empty() &&
           digits.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Puts the directory `from` at `to`, in one step also when `to` exists: then they change places, and what
/// was there is removed afterwards.
void move_into_place(const std::string& from, const std::string& to) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
    if (errno == EINVAL && ::rename(from.c_str(), to.c_str()) == 0) return;  // a file system without the flag
    if (errno == EEXIST || errno == ENOTEMPTY) {
        if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
            std::error_code ignored;
            fs::remove_all(from, ignored);
            return;
        }
    }
    fail_checkpoint(to, "rename");
}

void write_parts(const std::string& directory, std::span<const CheckpointPart> parts, const TrainingState& state) {
    // "pt": what other programs look for to know the layout of the tensors.
    const Metadata metadata = {{"format", "pt"}, {"step", std::to_string(state.step)}};
    for (const CheckpointPart& part : parts) {
        const cuda::HostCopies values(part.tensors, cuda::HostCopies::Begin::WithContents);
        write_safetensors(path_of(directory, part.name), values.tensors(), metadata);
    }
    DurableFile file(directory + "/state.json");
    const std::string json = to_json(state);
    file.write(json.data(), json.size());
    file.commit();
    sync_directory(directory);
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(std::string path, std::size_t keep)
    : path_(std::move(path)), keep_(keep) {
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
        write_parts(hidden, parts, state);
        move_into_place(hidden, final_path);
    } catch (...) {
        fs::remove_all(hidden, error);
        throw;
    }
    sync_directory(path_);
    replace_file(path_ + "/latest", name + "\n");
    remove_old(name);
    return final_path;
}

void CheckpointDirectory::remove_left_overs() const {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) {
        if (entry.path().filename().string().starts_with(kHiddenPrefix))
            fs::remove_all(entry.path(), ignored);
    }
    ::unlink((path_ + "/latest.new").c_str());
}

void CheckpointDirectory::remove_old(const std::string& newest) const {
    if (keep_ == 0) return;
    std::error_code ignored;
    // By time, not by number: a new run in an old directory starts again at low numbers.
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
        if (!is_checkpoint_name(name) || !fs::is_directory(path_ + "/" + name, ignored))
            throw InvalidInput(fmt::format("checkpoint {}/latest: names '{}', which is not a checkpoint there", path_,
                                           ddprun::excerpt(name)));
        return path_ + "/" + name;
    }
    if (latest.error().sys != ENOENT) throw InvalidInput("checkpoint " + latest.error().what);
    // Killed between the first rename and the first `latest`: a checkpoint that has its name is complete.
    std::optional<std::pair<fs::file_time_type, std::string>> newest;
    for (const auto& entry : fs::directory_iterator(path_, ignored)) {
        if (!is_checkpoint_name(entry.path().filename().string())) continue;
        std::pair<fs::file_time_type, std::string> found{entry.last_write_time(ignored),
                                                         entry.path().string()};
        if (!newest || found > *newest) newest = std::move(found);
    }
    if (!newest) return std::nullopt;
    return newest->second;
}

}  // namespace ddp
