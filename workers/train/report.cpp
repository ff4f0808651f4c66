#include "report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace train {

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
        "epoch {:>{}}/{}  loss {:.4f}  train {:5.1f} %  held-out {:5.1f} %  {} samples/s{}", r.epoch,
        std::to_string(epochs).size(), epochs, r.loss, 100 * r.training_accuracy, 100 * r.held_out_accuracy,
        grouped(static_cast<std::uint64_t>(r.samples_per_second)),
        r.communication_share ? fmt::format("  communication {:.0f} %", 100 * *r.communication_share) : "");
}

std::string to_json(const Summary& summary) {
    nlohmann::ordered_json epochs = nlohmann::ordered_json::array();
    for (const EpochResult& r : summary.epochs) {
        epochs.push_back(
            {{"epoch", r.epoch},
             {"loss", r.loss},
             {"training_accuracy", r.training_accuracy},
             {"held_out_accuracy", r.held_out_accuracy},
             {"samples_per_second", r.samples_per_second},
             {"communication_share", r.communication_share ? nlohmann::ordered_json(*r.communication_share)
                                                           : nlohmann::ordered_json()}});
    }
    nlohmann::ordered_json timings = nlohmann::ordered_json::array();
    for (const Timing& timing : summary.timings) {
        // What does not exist is null: JSON has no infinite numbers.
        timings.push_back(
            {{"what", timing.what}, {"milliseconds", timing.milliseconds}, {"taken", timing.taken}});
    }
    const nlohmann::ordered_json json = {{"world_size", summary.world_size},
                                         {"epochs", epochs},
                                         {"held_out_accuracy", summary.held_out_accuracy},
                                         {"seconds", summary.seconds},
                                         {"parameters_sha256", summary.digest},
                                         {"checkpoint", summary.checkpoint},
                                         {"timings", timings}};
    return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace train
