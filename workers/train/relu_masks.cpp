#include "relu_masks.h"

namespace train {

void ReluMasks::set_written(const void* mask, bool is_written) {
    if (is_written) written_.insert(mask);
    else written_.erase(mask);
}

void ReluMasks::note_forward(const Layer& layer, const ForwardTimes& times) {
    layers_.try_emplace(layer, Known{times, std::nullopt});
}

void ReluMasks::note_backward(const Layer& layer, const BackwardTimes& times) {
    const auto found = layers_.find(layer);
    if (found == layers_.end() || found->second.pays) return;
    found->second.pays = mask_pays(found->second.forward, times);
}

bool ReluMasks::is_wanted(const Layer& layer) const {
    const auto found = layers_.find(layer);
    return found == layers_.end() || found->second.pays.value_or(true);
}

}  // namespace train
