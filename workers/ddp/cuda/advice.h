#pragma once

#include <string>

namespace ddp::cuda {

/// What a user can do about a CUDA error whose own text does not say: a driver that is too old, a device that
/// is somebody else's or defective, an NVSwitch machine without its fabric manager. "" when there is nothing
/// to add. `runtime` and `driver` are versions as CUDA counts them (13000), 0 where they are not known. Pure.
std::string advice_for(int code, int runtime, int driver);

}  // namespace ddp::cuda
