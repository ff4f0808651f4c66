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
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "ddp/cuda/host_copies.h"
#include "ddp/durable_file.h"
#include "ddp/safetensors.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kPrefix = "step-";
/// Hidden, so that neither `ls` nor latest() takes it for a checkpoint.
constexpr std::string_view kHiddenPrefix = ".writing-";
constexpr int kStateFormat = 1;
/// A state.json is a few hundred bytes; a hostile one must not fill the memory.
constexpr std::uintmax_t kStateBytesLimit = 16 << 20;

[[noreturn]] void fail(const std::string& path, const char* attempt, int error = errno) {
    throw Error(fmt::format("checkpoint {}: {}: {}", path, attempt, std::strerror(error)));
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
    fail(to, "rename");
}

std::string to_json(const TrainingState& state) {
    const Json json = {{"format", kStateFormat},
                       {"epoch", state.epoch},
                       {"step", state.step},
                       {"sampler", {{"epoch", state.sampler.epoch}, {"consumed", state.sampler.consumed}}},
                       {"notes", state.notes}};
    return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

/// nullopt unless every member is there and of its type.
std::optional<TrainingState> from_json(const std::string& text) {
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object()) return std::nullopt;
    const auto number = [](const Json& object, const char* key) -> std::optional<std::uint64_t> {
        const auto found = object.is_object() ? object.find(key) : object.end();
        if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
        return found->get<std::uint64_t>();
    };
    const Json sampler = json.value("sampler", Json::object());
    const auto format = number(json, "format"), epoch = number(json, "epoch"), step = number(json, "step");
    const auto sampler_epoch = number(sampler, "epoch"), consumed = number(sampler, "consumed");
    if (format != kStateFormat || !epoch || !step || !sampler_epoch || !consumed) return std::nullopt;
    TrainingState state{*epoch, *step, {*sampler_epoch, *consumed}, {}};
    const Json notes = json.value("notes", Json::object());
    if (!notes.is_object()) return std::nullopt;
    for (const auto& [key, value] : notes.items()) {
        if (!value.is_string()) return std::nullopt;
        state.notes[key] = value.get<std::string>();
    }
    return state;
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
    if (error) fail(path_, "mkdir", error.value());
    remove_left_overs();

    const std::string name = fmt::format("{}{:06}", kPrefix, state.step);
    const std::string hidden = fmt::format("{}/{}{}", path_, kHiddenPrefix, name);
    const std::string final_path = path_ + "/" + name;
    if (::mkdir(hidden.c_str(), 0777) != 0) fail(hidden, "mkdir");
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
    if (std::ifstream file(path_ + "/latest"); file) {
        std::string name;
        std::getline(file, name);
        if (!is_checkpoint_name(name) || !fs::is_directory(path_ + "/" + name, ignored))
            throw InvalidInput(fmt::format(
                "checkpoint {}/latest: names '{}', which is not a checkpoint there", path_, name));
        return path_ + "/" + name;
    }
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
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) throw InvalidInput(fmt::format("checkpoint {}: {}", path, error.message()));
    if (bytes > kStateBytesLimit)
        throw InvalidInput(fmt::format("checkpoint {}: {} bytes are too many", path, bytes));
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    std::optional<TrainingState> state = from_json(text.str());
    if (!state) throw InvalidInput(fmt::format("checkpoint {}: not the state of a checkpoint", path));
    return *std::move(state);
}

TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer) {
    TrainingState state = load_state(checkpoint);
    const SafetensorsFile model_file = SafetensorsFile::open(checkpoint + "/model.safetensors");
    const SafetensorsFile optimizer_file = SafetensorsFile::open(checkpoint + "/optimizer.safetensors");
    model_file.require_same(model);
    optimizer_file.require_same(optimizer);
    using cuda::HostCopies;
    const HostCopies values(model, HostCopies::Begin::WithoutContents);
    const HostCopies states(optimizer, HostCopies::Begin::WithoutContents);
    model_file.read_into(values.tensors());
    optimizer_file.read_into(states.tensors());
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
    return from_json(zeros.substr(1)).value();
}

}  // namespace ddp
