#pragma once

#include <string>
#include <string_view>

namespace ddp {

/// The last error texts of NCCL and of CUDA in this process, for the error report: the program's exception
/// may not contain them, and a crash has no exception.
enum class DeviceLibrary { Nccl, Cuda };

/// Stores the library's error text of a failed call; the last one stays. Any thread; cut at 1000 bytes.
void note_device_error(DeviceLibrary library, std::string_view text) noexcept;

/// "" without a failure. Any thread, also in a signal handler; the text stays valid until the second call of
/// note_device_error after this one.
const char* last_device_error(DeviceLibrary library) noexcept;

/// The key in the error report: "nccl_error", "cuda_error".
const char* report_key(DeviceLibrary library) noexcept;

}  // namespace ddp
