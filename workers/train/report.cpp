#include "report.h"

#include <fmt/core.h>

#include "env/json.h"
#include "env/text.h"

namespace train {

using ddprun::Json;
using ddprun::json_list;

std::string grouped(std::uint64_t number) {
    std::string digits = std::to_string(number);
    for (std::size_t at = digits.size(); at > 3;) {
        at -= 3;
        digits.insert(at, 1, ',');
    }
    return digits;
}

std::string format_epoch(const EpochResult& r, std::uint64_t epochs) {
    return fmt::format(
        "epoch {:>{}}/{}  loss {:.4f}  train {:5.1f} %  held-out {:5.1f} %  {} samples/s  memory {}{}",
        r.epoch, std::to_string(epochs).size(), epochs, r.loss, 100 * r.training_accuracy,
        100 * r.held_out_accuracy, grouped(static_cast<std::uint64_t>(r.samples_per_second)),
        ddprun::format_bytes(r.memory.weights + r.memory.gradients + r.memory.optimizer),
        r.communication_share && r.waiting_share
            ? fmt::format("  communication {:.0f} %, waiting {:.0f} %", 100 * *r.communication_share,
                          100 * *r.waiting_share)
            : "");
}

namespace {

template <class AnyJson>
AnyJson epoch_json(const EpochResult& r) {
    const auto share = [](const std::optional<double>& value) { return value ? AnyJson(*value) : AnyJson(); };
    return {{"epoch", r.epoch},
            {"loss", r.loss},
            {"training_accuracy", r.training_accuracy},
            {"held_out_accuracy", r.held_out_accuracy},
            {"samples_per_second", r.samples_per_second},
            {"weights_bytes", r.memory.weights},
            {"gradients_bytes", r.memory.gradients},
            {"optimizer_bytes", r.memory.optimizer},
            {"communication_share", share(r.communication_share)},
            {"waiting_share", share(r.waiting_share)}};
}

}  // namespace

void to_json(nlohmann::json& json, const EpochResult& result) { json = epoch_json<nlohmann::json>(result); }

void from_json(const nlohmann::json& json, EpochResult& result) {
    const auto number = [&](const char* name) { return json.at(name).get<double>(); };
    const auto bytes = [&](const char* name) { return json.at(name).get<std::size_t>(); };
    const auto share = [&](const char* name) {
        return json.at(name).is_null() ? std::optional<double>() : number(name);
    };
    result = {.epoch = json.at("epoch").get<std::uint64_t>(),
              .loss = number("loss"),
              .training_accuracy = number("training_accuracy"),
              .held_out_accuracy = number("held_out_accuracy"),
              .samples_per_second = number("samples_per_second"),
              .memory = {bytes("weights_bytes"), bytes("gradients_bytes"), bytes("optimizer_bytes")},
              .communication_share = share("communication_share"),
              .waiting_share = share("waiting_share")};
}

std::string to_json(const Summary& summary) {
    const Json json = {{"world_size", summary.world_size},
                       {"epochs", json_list(summary.epochs, epoch_json<Json>)},
                       {"held_out_accuracy", summary.held_out_accuracy},
                       {"seconds", summary.seconds},
                       {"parameters_sha256", summary.digest},
                       {"checkpoint", summary.checkpoint}};
    return ddprun::to_text(json, 2) + "\n";
}

}  // namespace train
