#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

/// Additions to the CUDA runtime. Programs are linked with the static runtime, which looks for the driver at
/// the first call, so they also run without a driver. Tests link one over host memory instead; a build
/// without CUDA has a runtime that refuses every call (no_cuda.cpp).
namespace ddp::cuda {

using Stream = cudaStream_t;

/// "out of memory (CUDA error 2): the device's memory is full: ...": CUDA's text, and the remedy.
[[nodiscard]] std::string explain(cudaError_t code);
/// Throws Error "<attempt>: <CUDA's explanation>" unless the code is cudaSuccess. Clears the thread's last
/// error.
void check(cudaError_t code, const char* attempt);
/// True for cudaSuccess. Clears the thread's last error otherwise: the program would find it with its own
/// cudaGetLastError, and blame its last launch.
[[nodiscard]] bool succeeded(cudaError_t code);

/// Makes `device` current for the calling thread while this object lives: events, memory and the default
/// stream belong to the current device. Costs next to nothing when it is current already. A thread without a
/// context keeps the new device: going back would make a context on device 0, which costs hundreds of
/// megabytes there, and fails when another process has that device in exclusive mode.
class DeviceScope {
  public:
    /// Throws Error with CUDA's reason.
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
    bool restores_ = false;
};

enum class Priority : std::uint8_t { Normal, High };
/// A stream on the thread's device that does not wait for the default stream. The caller destroys it. Throws
/// Error, beginning with `attempt`.
Stream make_stream(Priority priority, const char* attempt);

/// A point in a stream. Thread-safe, as CUDA's events are.
class Event {
  public:
    /// `flags` is cudaEventDefault where milliseconds_since is used.
    explicit Event(unsigned flags = cudaEventDisableTiming);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(Stream stream) const;
    /// Work that is put on `stream` from now on begins after this point (cudaStreamWaitEvent).
    void block(Stream stream) const;
    /// cudaSuccess, cudaErrorNotReady, or the device's failure. "Not ready" does not become the thread's last
    /// error.
    [[nodiscard]] cudaError_t query() const;
    /// Blocks until the last recording is reached. Throws Error with the device's failure.
    void synchronize() const;
    /// The time between two recordings that were reached. Throws Error.
    [[nodiscard]] double milliseconds_since(const Event& earlier) const;

  private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace ddp::cuda
