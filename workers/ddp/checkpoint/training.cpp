#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "ddp/checkpoint.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/optimizer.h"
#include "ddp/worker/stacks.h"
#include "env/text.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;

/// Time limit of a save or a load; the group's time-out is for collectives.
constexpr std::chrono::hours kFileTimeout{1};

/// Runs `act` on rank 0 only, for kFileTimeout at most; every rank returns its result or throws its
/// exception.
std::string run_on_rank_zero(ProcessGroup& group, const std::function<std::string()>& act) {
    constexpr char kDone = '+', kWrong = '-', kFile = '/', kFailed = '!';
    std::string outcome;
    const TimeoutScope slow(group, std::max<std::chrono::nanoseconds>(group.timeout(), kFileTimeout));
    if (group.rank() == 0) {
        const HangDetectionPause awaited(kFileTimeout);
        try {
            outcome = kDone + act();
        } catch (const InvalidInput& error) {
            outcome = kWrong + std::string(error.what());
        } catch (const FileError& error) {
            outcome = kFile + std::string(error.what());
        } catch (const std::exception& error) {
            outcome = kFailed + std::string(error.what());
        }
    }
    const std::string zeros = group.all_gather_bytes(outcome).at(0), text = zeros.substr(1);
    if (zeros[0] == kWrong) throw InvalidInput(text);
    if (zeros[0] == kFile) throw FileError(text);
    if (zeros[0] == kFailed) throw Error(text);
    return text;
}

void check_names(const Training& training) {
    std::vector<std::string_view> names = {kModelPart, kOptimizerPart};
    for (const TrainingPart& part : training.parts) {
        const bool is_file_name =
            !part.name.empty() && std::all_of(part.name.begin(), part.name.end(), [](char c) {
                return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_';
            });
        if (!is_file_name)
            throw InvalidInput(
                fmt::format("checkpoint: a part cannot be named '{}': letters, digits, '-' and '_' only",
                            ddprun::excerpt(part.name)));
        if (std::find(names.begin(), names.end(), part.name) != names.end())
            throw InvalidInput(fmt::format("checkpoint: two parts are named '{}'", part.name));
        names.push_back(part.name);
    }
}

std::vector<CheckpointPart> parts_of(const Training& training) {
    check_names(training);
    std::vector<CheckpointPart> parts = {{kModelPart, training.model.state()},
                                         {kOptimizerPart, training.optimizer.state()}};
    for (const TrainingPart& part : training.parts) {
        if (part.state != nullptr) parts.push_back({part.name, part.state->state()});
    }
    return parts;
}

bool is_named(const Training& training, const std::string& part) {
    return part == kModelPart || part == kOptimizerPart ||
           std::any_of(training.parts.begin(), training.parts.end(),
                       [&](const TrainingPart& p) { return p.name == part; });
}

/// Throws for a file that no part would read: a schedule that a program forgets would restart silently.
void refuse_unknown_files(const std::string& checkpoint, const Training& training) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(checkpoint, ignored)) {
        const std::string name = entry.path().stem();
        if (entry.path().extension() != ".safetensors" || is_named(training, name)) continue;
        throw InvalidInput(fmt::format(
            "checkpoint {}: holds '{}', which this program does not resume: another program wrote it, or "
            "the same with other data or options",
            checkpoint, ddprun::excerpt(name)));
    }
}

/// The parts that both this run and the checkpoint have.
std::vector<CheckpointPart> parts_in(const std::string& checkpoint, const Training& training) {
    refuse_unknown_files(checkpoint, training);
    std::vector<CheckpointPart> parts = parts_of(training);
    for (const TrainingPart& part : training.parts) {
        if (part.state == nullptr || fs::exists(path_of(checkpoint, part.name))) continue;
        if (!part.optional)
            throw InvalidInput(fmt::format(
                "checkpoint {}: lacks '{}', which this program resumes: another program wrote it, or the "
                "same with other data or options",
                checkpoint, part.name));
        std::erase_if(parts, [&](const CheckpointPart& p) { return p.name == part.name; });
    }
    return parts;
}

/// Runs on rank 0. The sampler's position is checked before anything is written.
std::string read_training(const std::string& checkpoint, const Training& training) {
    const TrainingState state = load_state(checkpoint);
    DistributedSampler(training.sampler).restore(state.sampler);
    read_parts(checkpoint, parts_in(checkpoint, training), state);
    return to_json(state);
}

/// Sends rank 0's values to all ranks; for a group on devices, host memory is sent as bytes.
void broadcast_from_zero(ProcessGroup& group, const Tensor& tensor) {
    if (tensor.memory.device.kind == group.device().kind) return group.broadcast(tensor.memory, 0).wait();
    const std::string_view mine(static_cast<const char*>(tensor.memory.data), tensor.memory.bytes());
    const std::string zeros = group.all_gather_bytes(group.rank() == 0 ? mine : "").at(0);
    std::memcpy(tensor.memory.data, zeros.data(), zeros.size());
}

TrainingState broadcast_state(ProcessGroup& group, const std::string& state_json,
                              const std::string& checkpoint, const Training& training) {
    for (const CheckpointPart& part : parts_of(training)) {
        for (const Tensor& tensor : part.tensors) broadcast_from_zero(group, tensor);
    }
    TrainingState state = state_from_json(state_json, checkpoint);
    training.sampler.restore(state.sampler);
    training.model.state_loaded();
    training.optimizer.state_loaded();
    for (const TrainingPart& part : training.parts) {
        if (part.state != nullptr) part.state->state_loaded();
    }
    return state;
}

}  // namespace

std::string CheckpointDirectory::save(ProcessGroup& group, const Training& training,
                                      const std::map<std::string, std::string>& notes) {
    training.model.prepare_to_save(group);
    training.optimizer.prepare_to_save(group);
    for (const TrainingPart& part : training.parts) {
        if (part.state != nullptr) part.state->prepare_to_save(group);
    }
    return run_on_rank_zero(group, [&] {
        const SamplerState place = training.sampler.state();
        return write(parts_of(training), {place.epoch, training.optimizer.steps(), place, notes});
    });
}

std::optional<TrainingState> CheckpointDirectory::load(ProcessGroup& group, const Training& training) const {
    const std::string state = run_on_rank_zero(group, [&] {
        const std::optional<std::string> newest = latest();
        return newest ? read_training(*newest, training) : "";
    });
    if (state.empty()) return std::nullopt;
    return broadcast_state(group, state, path_, training);
}

TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint, const Training& training) {
    return broadcast_state(group,
                           run_on_rank_zero(group, [&] { return read_training(checkpoint, training); }),
                           checkpoint, training);
}

}  // namespace ddp
