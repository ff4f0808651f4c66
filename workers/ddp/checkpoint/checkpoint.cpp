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
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "ddp/checkpoint/durable_file.h"
#include "ddp/cuda/host_copies.h"
#include "ddp/optimizer.h"
#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;
using ddprun::Json;
using ddprun::Result;

constexpr std::string_view kPrefix = "step-";
/// Hidden, so that neither `ls` nor latest() takes it for a checkpoint.
constexpr std::string_view kHiddenPrefix = ".writing-";
constexpr int kStateFormat = 1;
/// A state.json is a few hundred bytes; a hostile one must not fill the memory.
constexpr std::size_t kStateBytesLimit = 16 << 20;
constexpr std::size_t kLatestBytesLimit = 4096;
/// Of epochs, steps and samples: far above any training, far below where sums and products wrap.
constexpr std::uint64_t kMostCount = std::uint64_t{1} << 48;

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

std::string to_json(const TrainingState& state) {
    Json notes = Json::object();
    for (const auto& [key, value] : state.notes) notes.set(key, value);
    const Json json = {{"format", kStateFormat},
                       {"epoch", state.epoch},
                       {"step", state.step},
                       {"sampler", {{"epoch", state.sampler.epoch}, {"consumed", state.sampler.consumed}}},
                       {"notes", notes}};
    return to_text(json, 2) + "\n";
}

/// Every member must be there, of its type, and what a training can have come to. Error: what is wrong.
Result<TrainingState> from_json(const std::string& text) {
    const auto wrong = [](std::string what) { return ddprun::Error{ddprun::Errc::InvalidArgument, std::move(what), 0}; };
    const std::optional<Json> object = ddprun::parse_json_object(text);
    if (!object) return wrong("not the state of a checkpoint");
    const Json &json = *object, &sampler = json["sampler"], &notes = json["notes"];
    const auto format = json["format"].as_uint64(), epoch = json["epoch"].as_uint64(), step = json["step"].as_uint64();
    const auto sampler_epoch = sampler["epoch"].as_uint64(), consumed = sampler["consumed"].as_uint64();
    if (format != kStateFormat || !epoch || !step || !sampler_epoch || !consumed) return wrong("not the state of a checkpoint");
    for (const std::uint64_t count : {*epoch, *step, *sampler_epoch, *consumed}) {
        if (count > kMostCount) return wrong(fmt::format("not the state of a checkpoint: no training comes to {}", count));
    }
    TrainingState state{*epoch, *step, {*sampler_epoch, *consumed}, {}};
    if (!notes.is_object() && !notes.is_null()) return wrong("not the state of a checkpoint");
    for (const auto& [key, value] : notes.members()) {
        if (!value.is_text()) return wrong(fmt::format("not the state of a checkpoint: its note '{}' is no text", ddprun::excerpt(key)));
        state.notes[key] = value.text();
    }
    return state;
}

/// The step counts that an optimizer's file lacks because it is of the time when state.json alone counted steps: the
/// common one, or it and those of all parameters.
std::vector<Tensor> counts_not_in(const SafetensorsFile& file, std::span<const Tensor> optimizer) {
    const auto is_of_parameter = [](const Tensor& tensor) { return tensor.name.starts_with(kStepPrefix); };
    const auto is_there = [&](const Tensor& tensor) { return file.entries().contains(tensor.name); };
    const bool has_any = std::any_of(optimizer.begin(), optimizer.end(),
                                     [&](const Tensor& tensor) { return is_of_parameter(tensor) && is_there(tensor); });
    std::vector<Tensor> counts;
    for (const Tensor& tensor : optimizer) {
        const bool is_count = tensor.name == kStepsName || (is_of_parameter(tensor) && !has_any);
        if (is_count && !is_there(tensor) && tensor.memory.bytes() == sizeof(TrainingState::step)) counts.push_back(tensor);
    }
    return counts;
}

std::vector<Tensor> without(std::span<const Tensor> all, std::span<const Tensor> left_out) {
    std::vector<Tensor> rest;
    std::copy_if(all.begin(), all.end(), std::back_inserter(rest), [&](const Tensor& tensor) {
        return std::none_of(left_out.begin(), left_out.end(),
                            [&](const Tensor& other) { return other.name == tensor.name; });
    });
    return rest;
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(std::string path, std::size_t keep)
    : path_(std::move(path)), keep_(keep) {
    if (path_.empty()) throw InvalidInput("checkpoint: the directory has no name");
}

std::string CheckpointDirectory::save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                                      const TrainingState& state) {
    std::error_code error;
    fs::create_directories(path_, error);
    if (error) fail_checkpoint(path_, "mkdir", error.value());
    remove_left_overs();

    const std::string name = fmt::format("{}{:06}", kPrefix, state.step);
    const std::string hidden = fmt::format("{}/{}{}", path_, kHiddenPrefix, name);
    const std::string final_path = path_ + "/" + name;
    if (::mkdir(hidden.c_str(), 0777) != 0) fail_checkpoint(hidden, "mkdir");
    try {
        using cuda::HostCopies;
        const HostCopies values(model, HostCopies::Begin::WithContents);
        const HostCopies states(optimizer, HostCopies::Begin::WithContents);
        write_parts(hidden, values.tensors(), states.tensors(), state);
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

void CheckpointDirectory::write_parts(const std::string& directory, std::span<const Tensor> model,
                                      std::span<const Tensor> optimizer, const TrainingState& state) const {
    // "pt": what other programs look for to know the layout of the tensors.
    const Metadata metadata = {{"format", "pt"}, {"step", std::to_string(state.step)}};
    write_safetensors(directory + "/model.safetensors", model, metadata);
    write_safetensors(directory + "/optimizer.safetensors", optimizer, metadata);
    DurableFile file(directory + "/state.json");
    const std::string json = to_json(state);
    file.write(json.data(), json.size());
    file.commit();
    sync_directory(directory);
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

TrainingState load_state(const std::string& checkpoint) {
    const std::string path = checkpoint + "/state.json";
    const Result<std::string> text = ddprun::read_regular_file(path, kStateBytesLimit);
    if (!text) throw InvalidInput("checkpoint " + text.error().what);
    Result<TrainingState> state = from_json(*text);
    if (!state) throw InvalidInput(fmt::format("checkpoint {}: {}", path, state.error().what));
    return *std::move(state);
}

TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer) {
    TrainingState state = load_state(checkpoint);
    const SafetensorsFile model_file = SafetensorsFile::open(checkpoint + "/model.safetensors");
    const SafetensorsFile optimizer_file = SafetensorsFile::open(checkpoint + "/optimizer.safetensors");
    model_file.require_same(model);
    optimizer_file.require_same(without(optimizer, counts_not_in(optimizer_file, optimizer)));
    using cuda::HostCopies;
    const HostCopies values(model, HostCopies::Begin::WithoutContents);
    const HostCopies states(optimizer, HostCopies::Begin::WithoutContents);
    model_file.read_into(values.tensors());
    const std::vector<Tensor> counts = counts_not_in(optimizer_file, states.tensors());
    optimizer_file.read_into(without(states.tensors(), counts));
    for (const Tensor& count : counts) std::memcpy(count.memory.data, &state.step, sizeof state.step);
    values.upload();
    states.upload();
    return state;
}

TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint,
                              std::span<const Tensor> model, std::span<const Tensor> optimizer) {
    constexpr char kLoaded = '+', kWrong = '-', kFailed = '!';
    std::string outcome;
    if (group.rank() == 0) {
        try {
            outcome = kLoaded + to_json(load_checkpoint(checkpoint, model, optimizer));
        } catch (const InvalidInput& error) {
            outcome = kWrong + std::string(error.what());
        } catch (const std::exception& error) {
            outcome = kFailed + std::string(error.what());
        }
    }
    const std::string zeros = group.all_gather_bytes(outcome).at(0);
    if (zeros[0] == kWrong) throw InvalidInput(zeros.substr(1));
    if (zeros[0] == kFailed) throw Error(zeros.substr(1));
    for (const std::span<const Tensor> tensors : {model, optimizer}) {
        for (const Tensor& tensor : tensors) group.broadcast(tensor.memory, 0).wait();
    }
    return *from_json(zeros.substr(1));
}

}  // namespace ddp
