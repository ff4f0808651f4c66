#include "ddp/cuda/advice.h"

#include <fmt/core.h>

namespace ddp::cuda {
namespace {

std::string version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

std::string for_old_driver(int runtime, int driver) {
    // Without a driver CUDA reports the same error, and a driver version of 0.
    if (driver == 0)
        return "no NVIDIA driver is loaded on this node, or the container was not given its GPUs";
    return fmt::format(
        "the driver runs CUDA up to {}, the program was built with {}: update the driver, or build with the toolkit of "
        "CUDA {}",
        version(driver), version(runtime), driver / 1000);
}

}  // namespace

std::string advice_for(int code, int runtime, int driver) {
    switch (code) {  // cudaError_t
        case 2:
            return "the device's memory is full: a smaller batch, or another process is on it (ddprun "
                   "doctor)";
        case 35: return for_old_driver(runtime, driver);
        case 46:
            return "another process has the device, and its compute mode admits only one: another device, or "
                   "nvidia-smi -c DEFAULT";
        case 100: return "no device is visible: see CUDA_VISIBLE_DEVICES and the allocation";
        case 201: return "the calling thread has not chosen a device: cudaSetDevice first";
        case 209: return "the program has no code for this device's generation";
        case 214: return "the device's memory is defective: take it out of service (ddprun doctor)";
        case 222:
            return "the driver is older than the toolkit that made the program's PTX: update the driver";
        case 400:
            return "a stream or an event of another device, or one that was destroyed: the calling thread works on "
                   "the device of its group (cudaSetDevice)";
        case 700:
        case 716:
        case 719: return "a kernel crashed, this one or one before it; compute-sanitizer finds where";
        case 802:
            return "on an NVSwitch machine the fabric manager must run: systemctl status "
                   "nvidia-fabricmanager";
        case 803:
            return "the driver's libraries and its kernel module are of different versions: reboot, or give "
                   "the container the host's";
        case 804:
            return "this GPU does not take the CUDA compatibility package: update the driver, or remove the "
                   "package from LD_LIBRARY_PATH";
        case 805:
        case 806:
        case 807:
            return "the MPS server does not answer: nvidia-cuda-mps-control -d on this node, or unset "
                   "CUDA_MPS_PIPE_DIRECTORY";
        case 808:
        case 809: return "the MPS server takes no more clients: fewer workers per GPU";
        case 900:
        case 906: return "between the begin and the end of a capture nothing may wait, allocate or ask";
        default: return "";
    }
}

}  // namespace ddp::cuda
