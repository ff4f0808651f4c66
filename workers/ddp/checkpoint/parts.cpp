#include "ddp/checkpoint/parts.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <utility>

#include "ddp/checkpoint/shards.h"
#include "ddp/optimizer.h"
#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"

namespace ddp {
namespace {

using cuda::HostCopies;
using ddprun::as;
using ddprun::Json;
using ddprun::member;
using ddprun::members;
using ddprun::Result;

constexpr int kStateFormat = 1;
/// A state.json has a few hundred bytes; a hostile one must not fill the memory.
constexpr std::size_t kStateBytesLimit = 16 << 20;
/// Limit of epochs, steps and samples: far above any training, far below overflow of sums and products.
constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 48;

Result<std::uint64_t> count_in(const Json& object, std::string_view name) {
    return as<std::uint64_t>(object, name);
}

/// Error: the fault in the text.
Result<TrainingState> from_json(const std::string& text) {
    constexpr auto wrong = ddprun::Error::invalid;
    const Result<Json> object = ddprun::parse_json_object(text);
    if (!object) return wrong("not the state of a checkpoint");
    const Json &json = *object, &sampler = member(json, "sampler"), &notes = member(json, "notes");
    const auto epoch = count_in(json, "epoch"), step = count_in(json, "step");
    const auto sampler_epoch = count_in(sampler, "epoch"), consumed = count_in(sampler, "consumed");
    const bool is_known = as<int>(json, "format").value_or(0) == kStateFormat;
    if (!is_known || !epoch || !step || !sampler_epoch || !consumed)
        return wrong("not the state of a checkpoint");
    for (const std::uint64_t count : {*epoch, *step, *sampler_epoch, *consumed}) {
        if (count > kMaxCount)
            return wrong(fmt::format("not the state of a checkpoint: the count {} is too large", count));
    }
    TrainingState state{*epoch, *step, {*sampler_epoch, *consumed}, {}};
    const auto samples = count_in(sampler, "samples"), seed = count_in(sampler, "seed");
    if (samples) state.sampler.order = {*samples, seed.has_value(), seed ? *seed : 0};
    if (!notes.is_object() && !notes.is_null()) return wrong("not the state of a checkpoint");
    for (const auto& [key, value] : members(notes)) {
        const Result<std::string> note = as<std::string>(value);
        if (!note)
            return wrong(fmt::format("not the state of a checkpoint: the note '{}' is not a string",
                                     ddprun::excerpt(key)));
        state.notes[key] = *note;
    }
    return state;
}

/// Step counts that an old optimizer file lacks, because only state.json counted steps then: the common
/// count, or that and those of all parameters.
std::vector<Tensor> counts_not_in(const SafetensorsFile& file, std::span<const Tensor> optimizer) {
    const auto is_of_parameter = [](const Tensor& tensor) { return tensor.name.starts_with(kStepPrefix); };
    const auto is_there = [&](const Tensor& tensor) { return file.entries().contains(tensor.name); };
    const bool has_any = std::any_of(optimizer.begin(), optimizer.end(), [&](const Tensor& tensor) {
        return is_of_parameter(tensor) && is_there(tensor);
    });
    std::vector<Tensor> counts;
    for (const Tensor& tensor : optimizer) {
        const bool is_count = tensor.name == kStepsName || (is_of_parameter(tensor) && !has_any);
        if (is_count && !is_there(tensor) && tensor.memory.bytes() == sizeof(TrainingState::step))
            counts.push_back(tensor);
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

std::string path_of(const std::string& checkpoint, std::string_view part) {
    return fmt::format("{}/{}{}", checkpoint, part, kFileSuffix);
}

std::string index_path_of(const std::string& checkpoint, std::string_view part) {
    return fmt::format("{}{}", path_of(checkpoint, part), kIndexSuffix);
}

std::string state_path_of(const std::string& checkpoint) { return checkpoint + "/state.json"; }

std::string find_part(const std::string& checkpoint, std::string_view part) {
    for (const std::string& path : {path_of(checkpoint, part), index_path_of(checkpoint, part)}) {
        std::error_code ignored;
        if (std::filesystem::exists(path, ignored)) return path;
    }
    return "";
}

std::string to_json(const TrainingState& state) {
    Json sampler = {{"epoch", state.sampler.epoch}, {"consumed", state.sampler.consumed}};
    if (const auto& order = state.sampler.order) {
        sampler["samples"] = order->samples;
        if (order->shuffle) sampler["seed"] = order->seed;
    }
    const Json json = {{"format", kStateFormat},
                       {"epoch", state.epoch},
                       {"step", state.step},
                       {"sampler", sampler},
                       {"notes", state.notes}};
    return ddprun::to_text(json, 2) + "\n";
}

TrainingState state_from_json(const std::string& text, const std::string& place) {
    Result<TrainingState> state = from_json(text);
    if (!state) throw InvalidInput(fmt::format("checkpoint {}: {}", place, state.error().what));
    return *std::move(state);
}

TrainingState load_state(const std::string& checkpoint) {
    const std::string path = state_path_of(checkpoint);
    const Result<std::string> text = ddprun::read_regular_file(path, kStateBytesLimit);
    if (!text) throw InvalidInput("checkpoint " + text.error().what);
    return state_from_json(*text, path);
}

PartReader::PartReader(const std::string& checkpoint, std::span<const CheckpointPart> parts, What what) {
    for (const CheckpointPart& part : parts) {
        const std::string path = find_part(checkpoint, part.name);
        SafetensorsFile file = SafetensorsFile::open(path.empty() ? path_of(checkpoint, part.name) : path);
        const std::vector<Tensor> absent =
            part.name == kOptimizerPart ? counts_not_in(file, part.tensors) : std::vector<Tensor>{};
        file.require_same(without(part.tensors, absent));
        std::vector<Tensor> wanted = part.tensors;
        if (what == What::PartsOfTensors)
            std::erase_if(wanted, [](const Tensor& tensor) { return !tensor.part_begin; });
        HostCopies copies(wanted, HostCopies::Begin::WithoutContents);
        files_.push_back({std::move(file), absent, std::move(copies)});
    }
}

void PartReader::read(std::uint64_t step) const {
    for (const PartFile& part : files_) {
        part.file.fill(without(part.copies.tensors(), part.counts));
        for (const Tensor& tensor : part.copies.tensors()) {
            const bool is_count = std::any_of(part.counts.begin(), part.counts.end(),
                                              [&](const Tensor& count) { return count.name == tensor.name; });
            if (is_count) std::memcpy(tensor.memory.data, &step, sizeof step);
        }
    }
    for (const PartFile& part : files_) part.copies.upload();
}

TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer) {
    require_whole(checkpoint, model);
    require_whole(checkpoint, optimizer);
    const TrainingState state = load_state(checkpoint);
    const std::vector<CheckpointPart> parts = {{kModelPart, {model.begin(), model.end()}},
                                               {kOptimizerPart, {optimizer.begin(), optimizer.end()}}};
    PartReader(checkpoint, parts).read(state.step);
    return state;
}

SafetensorsFile::Unmatched load_weights(const std::string& path, std::span<const Tensor> model,
                                        const SafetensorsFile::Rename& rename) {
    const HostCopies values(model, HostCopies::Begin::WithContents);
    SafetensorsFile::Unmatched unmatched =
        SafetensorsFile::open(path).read_matching(values.tensors(), rename);
    values.upload();
    return unmatched;
}

}  // namespace ddp
