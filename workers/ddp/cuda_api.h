#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "ddp/shared_library.h"

/// The few calls of the CUDA runtime that the NCCL backend makes, found at run time like NCCL itself.
/// cuda_abi_check.cpp compares them with cuda_runtime_api.h where that header is there.
namespace ddp::cuda {

struct StreamObject;
struct EventObject;
using Stream = StreamObject*;
using EventHandle = EventObject*;

enum class Code : int { Success = 0, NotReady = 600 };
enum class CopyKind : int { HostToDevice = 1, DeviceToHost = 2 };
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;

struct Api {
    std::string library;
    Code (*get_device_count)(int* count);
    Code (*set_device)(int device);
    Code (*runtime_get_version)(int* version);
    Code (*driver_get_version)(int* version);
    Code (*device_get_stream_priority_range)(int* least, int* greatest);
    Code (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
    Code (*stream_destroy)(Stream stream);
    Code (*stream_wait_event)(Stream stream, EventHandle event, unsigned flags);
    Code (*event_create_with_flags)(EventHandle* event, unsigned flags);
    Code (*event_record)(EventHandle event, Stream stream);
    Code (*event_query)(EventHandle event);
    Code (*event_destroy)(EventHandle event);
    Code (*malloc)(void** address, std::size_t bytes);
    Code (*free)(void* address);
    Code (*memcpy_async)(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream);
    Code (*memset_async)(void* address, int value, std::size_t bytes, Stream stream);
    const char* (*get_error_string)(Code code);

    /// Throws ddp::Error "<attempt>: <CUDA's explanation>" unless the code is Success.
    void check(Code code, const char* attempt) const;
};

/// DDP_CUDART_LIBRARY, else libcudart.so.13, .12, .11.0. Error: NotFound, Mismatch naming what it lacks.
ddprun::Result<Api> load_api();
ddprun::Result<Api> api_from(const SharedLibrary& library);

/// A point in a stream. Thread-safe as CUDA's events are.
class Event {
  public:
    explicit Event(std::shared_ptr<const Api> api);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(Stream stream) const;
    /// Work that `stream` is given from now on begins after this point.
    void hold_back(Stream stream) const;
    /// Success, NotReady, or what went wrong on the device.
    [[nodiscard]] Code query() const;

  private:
    std::shared_ptr<const Api> api_;
    EventHandle event_ = nullptr;
};

}  // namespace ddp::cuda
