#pragma once

#include <string>

namespace ddp::cuda {

/// The remedy for a CUDA error whose own text gives none: a driver that is too old, a device that another
/// process uses or that is defective, an NVSwitch machine without its fabric manager. "" for other errors.
/// `runtime` and `driver` are versions as CUDA counts them (13000), 0 when unknown. Pure.
std::string advice_for(int code, int runtime, int driver);

}  // namespace ddp::cuda
