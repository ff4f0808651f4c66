#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "ddp/checkpoint.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/checkpoint/save.h"
#include "ddp/checkpoint/shards.h"
#include "ddp/checkpoint/writer_lock.h"
#include "ddp/model.h"
#include "ddp/optimizer.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/stacks.h"
#include "env/text.h"

namespace ddp {
namespace {

namespace fs = std::filesystem;

std::chrono::nanoseconds file_timeout(const ProcessGroup& group) {
    return std::max<std::chrono::nanoseconds>(group.timeout(), kFileTimeout);
}

// The first byte of a rank's outcome. After kElsewhere comes the rank that knows the reason.
constexpr char kDone = '+', kWrong = '-', kFile = '/', kFailed = '!', kElsewhere = '@';

[[noreturn]] void rethrow(std::span<const std::string> outcomes, std::size_t rank) {
    const char kind = outcomes[rank][0];
    const std::string text = outcomes[rank].substr(1);
    if (kind == kWrong) throw InvalidInput(text);
    if (kind == kFile) throw FileError(text);
    if (kind == kFailed) throw Error(text);
    const std::size_t space = text.find(' '), other = std::stoul(text);
    if (outcomes[other][0] == kDone) throw FileError(text.substr(space + 1));
    rethrow(outcomes, other);
}

/// Collective: runs `act`, which is not collective, on every rank, for kFileTimeout at most. Every rank
/// returns all results, or throws the exception of the first rank that has one.
std::vector<std::string> agree(ProcessGroup& group, const std::function<std::string()>& act) {
    std::string outcome;
    const TimeoutScope slow(group, file_timeout(group));
    try {
        const HangDetectionPause awaited(kFileTimeout);
        outcome = kDone + act();
    } catch (const InvalidInput& error) {
        outcome = kWrong + std::string(error.what());
    } catch (const OtherRankFailed& error) {
        outcome = fmt::format("{}{} {}", kElsewhere, error.rank, error.what());
    } catch (const FileError& error) {
        outcome = kFile + std::string(error.what());
    } catch (const std::exception& error) {
        outcome = kFailed + std::string(error.what());
    }
    std::vector<std::string> outcomes = group.all_gather_bytes(outcome);
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
        if (outcomes[rank][0] != kDone) rethrow(outcomes, rank);
    }
    for (std::string& one : outcomes) one.erase(0, 1);
    return outcomes;
}

/// Likewise, without results.
void run_on_all(ProcessGroup& group, const std::function<void()>& act) {
    agree(group, [&] { return act(), ""; });
}

/// Likewise on rank 0 only; every rank returns its result.
std::string run_on_rank_zero(ProcessGroup& group, const std::function<std::string()>& act) {
    return agree(group, [&] { return group.rank() == 0 ? act() : ""; }).at(0);
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

/// "model" for the files "model.safetensors", "model.safetensors.index.json" and
/// "model-00001-of-00002.safetensors".
std::string part_in(const std::string& file) {
    const std::string name = file.substr(0, file.find(kFileSuffix));
    constexpr std::string_view kNumbers = "-00001-of-00002";
    if (name.size() <= kNumbers.size()) return name;
    std::string numbers = name.substr(name.size() - kNumbers.size());
    std::replace_if(
        numbers.begin(), numbers.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
    return numbers == "-00000-of-00000" ? name.substr(0, name.size() - kNumbers.size()) : name;
}

/// Throws for a file that no part would read: a schedule that a program forgets would restart silently.
void refuse_unknown_files(const std::string& checkpoint, const Training& training) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(checkpoint, ignored)) {
        const std::string name = part_in(entry.path().filename());
        if (entry.path().extension() != kFileSuffix || is_named(training, name)) continue;
        throw InvalidInput(fmt::format(
            "checkpoint {}: holds '{}', which this program does not resume: another program wrote it, or "
            "the same with other data or options",
            checkpoint, ddprun::excerpt(name)));
    }
}

/// The parts that this rank reads and both this run and the checkpoint have: all on rank 0, elsewhere those
/// with parts of tensors.
std::vector<CheckpointPart> parts_in(const std::string& checkpoint, const Training& training, bool all) {
    std::vector<CheckpointPart> parts = parts_of(training);
    if (!all) std::erase_if(parts, [](const CheckpointPart& part) { return !is_sharded(part.tensors); });
    for (const TrainingPart& part : training.parts) {
        const auto is_it = [&](const CheckpointPart& p) { return p.name == part.name; };
        if (std::ranges::none_of(parts, is_it) || !find_part(checkpoint, part.name).empty()) continue;
        if (!part.optional)
            throw InvalidInput(fmt::format(
                "checkpoint {}: lacks '{}', which this program resumes: another program wrote it, or the "
                "same with other data or options",
                checkpoint, part.name));
        std::erase_if(parts, is_it);
    }
    return parts;
}

/// Collective. Reads the whole tensors on rank 0 and each rank's parts of tensors; returns state.json's
/// content. All checks, on all ranks, come before anything is written.
std::string read_training(ProcessGroup& group, const std::string& checkpoint, const Training& training) {
    const bool is_first = group.rank() == 0;
    TrainingState state;
    std::optional<PartReader> reader;
    run_on_all(group, [&] {
        if (is_first) {
            state = load_state(checkpoint);
            DistributedSampler(training.sampler).restore(state.sampler);
            refuse_unknown_files(checkpoint, training);
        }
        reader.emplace(checkpoint, parts_in(checkpoint, training, is_first),
                       is_first ? PartReader::What::All : PartReader::What::PartsOfTensors);
    });
    return agree(group,
                 [&] {
                     reader->read(state.step);
                     return is_first ? to_json(state) : "";
                 })
        .at(0);
}

/// Sends rank 0's values to all ranks; for a group on devices, host memory is sent as bytes.
void broadcast_from_zero(ProcessGroup& group, const Tensor& tensor) {
    if (tensor.memory.device.kind == group.device().kind) return group.broadcast(tensor.memory, 0).wait();
    const std::string_view mine(static_cast<const char*>(tensor.memory.data), tensor.memory.bytes());
    const std::string zeros = group.all_gather_bytes(group.rank() == 0 ? mine : "").at(0);
    std::memcpy(tensor.memory.data, zeros.data(), zeros.size());
}

/// Collective: `checkpoint` is the same on all ranks.
TrainingState load_agreed(ProcessGroup& group, const std::string& checkpoint, const Training& training) {
    const std::string state_json = read_training(group, checkpoint, training);
    for (const CheckpointPart& part : parts_of(training)) {
        for (const Tensor& tensor : part.tensors) {
            if (!tensor.part_begin) broadcast_from_zero(group, tensor);
        }
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

/// Collective: the files that this rank writes, and those that rank 0 waits for.
void add_files(ProcessGroup& group, std::span<const CheckpointPart> parts, std::span<const ShardPlan> plans,
               std::uint64_t step, cuda::HostScratch& scratch, CheckpointSave& save) {
    const Metadata metadata = metadata_of(step);
    Metadata of_shards = metadata;
    of_shards[kSaveKey] = save_name_of(save.hidden);
    const auto self = static_cast<std::size_t>(group.rank());
    const bool on_host = group.device() == Device{};
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) bytes += gathered_bytes(parts[i].tensors, plans[i], self);
    std::byte* memory = nullptr;
    if (bytes > 0 && on_host) memory = scratch.reserve(nullptr, bytes);
    else if (bytes > 0) memory = save.on_device.emplace(cuda::Gpu::of(group.device().index), bytes).get();
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto& [name, tensors] = parts[i];
        const ShardPlan& plan = plans[i];
        if (!is_sharded(tensors)) {
            if (self == 0) save.files.push_back({path_of(save.hidden, name), tensors, metadata});
            continue;
        }
        std::vector<Tensor> gathered = gather_shards(group, tensors, plan, memory);
        memory += gathered_bytes(tensors, plan, self);
        for (std::size_t rank = 0; rank < plan.files.size(); ++rank) {
            const std::string path = save.hidden + "/" + plan.files[rank];
            if (plan.files[rank].empty()) continue;
            if (rank == self) save.files.push_back({path, std::move(gathered), of_shards, on_host});
            else if (self == 0) save.awaited.emplace_back(rank, path);
        }
        if (self == 0)
            save.texts.emplace_back(index_path_of(save.hidden, name),
                                    index_of(tensors, plan, of_shards[kSaveKey]));
    }
}

}  // namespace

std::string CheckpointDirectory::save(ProcessGroup& group, const Training& training,
                                      const std::map<std::string, std::string>& notes) {
    const trace::Scope traced(trace::TraceKind::Checkpoint, "save");
    finish(group);
    training.model.prepare_to_save(group);
    training.optimizer.prepare_to_save(group);
    for (const TrainingPart& part : training.parts) {
        if (part.state != nullptr) part.state->prepare_to_save(group);
    }
    const TimeoutScope slow(group, file_timeout(group));
    const std::uint64_t step = training.optimizer.steps();
    std::vector<CheckpointPart> parts;
    const std::vector<std::string> held = agree(group, [&] {
        if (group.rank() != 0) writer_.reset();  // this process was rank 0 of a group before
        parts = parts_of(training);
        for (const CheckpointPart& part : parts) check_tensors(part.tensors);
        return pieces_of(parts, static_cast<std::size_t>(group.rank()));
    });
    const std::vector<ShardPlan> plans = plan_shards(parts, held);
    auto save = std::make_unique<CheckpointSave>();
    save->publishes = group.rank() == 0;
    save->hidden = run_on_rank_zero(group, [&] {
        const SamplerState place = training.sampler.state();
        const TrainingState state = {place.epoch, step, place, notes};
        const std::string hidden = begin(step);
        save->texts.emplace_back(state_path_of(hidden), to_json(state));
        return hidden;
    });
    add_files(group, parts, plans, step, *gathered_, *save);
    const std::string path = published_path(save->hidden);
    if (options_.asynchronous) {
        run_on_all(group, [&] {
            save->copy(copies_);
            save->create();
        });
        write_in_background(std::move(save));
        return path;
    }
    run_on_all(group, [&] {
        save->create();
        save->write(copies_);
    });
    run_on_all(group, [&] {
        if (!save->publishes) return;
        publish(*save, [&] {
            if (group.is_over())
                throw PeerLostError(fmt::format("checkpoint {}: a rank was lost while it was saved", path));
        });
    });
    return path;
}

void CheckpointDirectory::claim(ProcessGroup& group) {
    finish(group);
    run_on_rank_zero(group, [this] { return hold(), ""; });
}

void CheckpointDirectory::finish(ProcessGroup& group) {
    if (!options_.asynchronous) return;
    try {
        // A process that replaces a lost one has no save of its own to wait for.
        run_on_all(group, [&] {
            if (pending_.valid()) pending_.get();
        });
    } catch (...) {
        // No rank writes any more, so what the others wrote after rank 0's failure can go.
        if (group.rank() == 0 && writer_) remove_left_overs();
        throw;
    }
}

std::optional<TrainingState> CheckpointDirectory::load(ProcessGroup& group, const Training& training) {
    const trace::Scope traced(trace::TraceKind::Checkpoint, "load");
    finish(group);
    const std::string newest = run_on_rank_zero(group, [&] { return latest().value_or(""); });
    if (newest.empty()) return std::nullopt;
    return load_agreed(group, newest, training);
}

TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint, const Training& training) {
    const trace::Scope traced(trace::TraceKind::Checkpoint, "load");
    return load_agreed(group, run_on_rank_zero(group, [&] { return checkpoint; }), training);
}

SafetensorsFile::Unmatched load_weights(ProcessGroup& group, const std::string& path, Model& model,
                                        const SafetensorsFile::Rename& rename) {
    model.broadcast_weights_once();
    SafetensorsFile::Unmatched unmatched;
    run_on_all(group, [&] {
        const cuda::HostCopies values(model.state(), cuda::HostCopies::Begin::WithContents);
        unmatched = SafetensorsFile::open(path).fill_matching(values.tensors(), rename);
        values.upload();
    });
    for (const Tensor& tensor : model.state()) {
        if (!tensor.part_begin) broadcast_from_zero(group, tensor);
    }
    model.state_loaded();
    return unmatched;
}

}  // namespace ddp
