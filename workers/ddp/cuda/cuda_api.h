#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

/// What libddp adds to the CUDA runtime. Programs are linked with the static one, which looks for the driver
/// at the first call: they run where there is none too. Tests link one over host memory in its place; a build
/// without CUDA has a runtime that refuses everything (no_cuda.cpp).
namespace ddp::cuda {

using Stream = cudaStream_t;

/// "out of memory (CUDA error 2): the device's memory is full: ...": CUDA's words, and what to do.
[[nodiscard]] std::string explain(cudaError_t code);
/// Throws Error "<attempt>: <CUDA's explanation>" unless the code is cudaSuccess. A failure is told here, and
/// is not the thread's last error any more.
void check(cudaError_t code, const char* attempt);
/// Whether a call that may be refused was not. A refusal is not left behind either: the program would find it
/// with its own cudaGetLastError, and blame its last launch.
[[nodiscard]] bool succeeded(cudaError_t code);

/// For the life of this object the calling thread's CUDA calls are for that device: events, memory and the
/// default stream belong to the one that is current. Costs next to nothing when it is the current one anyway.
/// A thread that never worked on any device stays on this one: going back would make a context on device 0,
/// which costs hundreds of megabytes there, and is refused where another process has that device for itself.
class DeviceScope {
  public:
    /// Throws Error with CUDA's reason.
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
    bool goes_back_ = false;
};

enum class Priority : std::uint8_t { Normal, High };
/// A stream on the thread's device that does not wait for the default stream. The caller destroys it. Throws
/// Error, beginning with `attempt`.
Stream make_stream(Priority priority, const char* attempt);

/// A point in a stream. Thread-safe as CUDA's events are.
class Event {
  public:
    /// `flags`: cudaEventDefault where milliseconds_since is wanted.
    explicit Event(unsigned flags = cudaEventDisableTiming);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(Stream stream) const;
    /// Work that `stream` is given from now on begins after this point.
    void hold_back(Stream stream) const;
    /// cudaSuccess, cudaErrorNotReady, or what went wrong on the device. "Not ready" is no error of the
    /// thread's afterwards.
    [[nodiscard]] cudaError_t query() const;
    /// Blocks until the last recording is reached. Throws Error with what went wrong on the device.
    void synchronize() const;
    /// Of two recordings that were reached. Throws Error.
    [[nodiscard]] double milliseconds_since(const Event& earlier) const;

  private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace ddp::cuda
