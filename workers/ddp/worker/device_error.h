#pragma once

#include <string>
#include <string_view>

namespace ddp {

/// The last words of NCCL and of CUDA in this process, for the error report: what the program throws in the
/// end may say something else, or a crash nothing at all.
enum class DeviceLibrary { Nccl, Cuda };

/// Remembers what the library said when a call failed; the last one stays. Any thread; cut at 1000 bytes.
void note_device_error(DeviceLibrary library, std::string_view text) noexcept;

/// "" when nothing has failed. Any thread, also in a signal handler; the text stays until the second note
/// after it.
const char* last_device_error(DeviceLibrary library) noexcept;

/// The key in the error report: "nccl_error", "cuda_error".
const char* report_key(DeviceLibrary library) noexcept;

}  // namespace ddp
