#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ddp/shared_library.h"

/// The few calls of the CUDA runtime that libddp makes, found at run time like NCCL itself.
/// cuda_abi_check.cpp compares them with cuda_runtime_api.h where that header is there.
namespace ddp::cuda {

struct ContextObject;
struct StreamObject;
struct EventObject;
struct GraphObject;
struct GraphExecObject;
using Stream = StreamObject*;
using EventHandle = EventObject*;
using GraphHandle = GraphObject*;
using GraphExecHandle = GraphExecObject*;

enum class Code : int { Success = 0, NotReady = 600 };
enum class CopyKind : int { HostToDevice = 1, DeviceToHost = 2, DeviceToDevice = 3, Default = 4 };
enum class Attribute : int { Multiprocessors = 16, CapabilityMajor = 75, CapabilityMinor = 76 };
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };
enum class CaptureStatus : int { None = 0, Active = 1, Invalidated = 2 };
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;

struct Api {
    std::string library;
    Code (*get_device_count)(int* count);
    Code (*get_device)(int* device);
    Code (*set_device)(int device);
    Code (*device_synchronize)();
    Code (*device_get_attribute)(int* value, Attribute attribute, int device);
    Code (*device_get_pci_bus_id)(char* text, int length, int device);
    Code (*mem_get_info)(std::size_t* free, std::size_t* total);
    Code (*runtime_get_version)(int* version);
    Code (*driver_get_version)(int* version);
    Code (*device_get_stream_priority_range)(int* least, int* greatest);
    Code (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
    Code (*stream_destroy)(Stream stream);
    Code (*stream_synchronize)(Stream stream);
    Code (*stream_wait_event)(Stream stream, EventHandle event, unsigned flags);
    Code (*event_create_with_flags)(EventHandle* event, unsigned flags);
    Code (*event_record)(EventHandle event, Stream stream);
    Code (*event_query)(EventHandle event);
    Code (*event_synchronize)(EventHandle event);
    Code (*event_elapsed_time)(float* milliseconds, EventHandle from, EventHandle to);
    Code (*event_destroy)(EventHandle event);
    Code (*malloc)(void** address, std::size_t bytes);
    Code (*free)(void* address);
    Code (*host_alloc)(void** address, std::size_t bytes, unsigned flags);
    Code (*free_host)(void* address);
    Code (*host_register)(void* address, std::size_t bytes, unsigned flags);
    Code (*host_unregister)(void* address);
    Code (*memcpy_async)(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream);
    Code (*memset_async)(void* address, int value, std::size_t bytes, Stream stream);
    /// Forgets and returns the last error of the calling thread.
    Code (*get_last_error)();
    const char* (*get_error_string)(Code code);

    // Capture and graphs: CUDA 11.4; null in older ones, all or none (has_graphs).
    Code (*stream_begin_capture)(Stream stream, CaptureMode mode);
    Code (*stream_end_capture)(Stream stream, GraphHandle* graph);
    Code (*stream_is_capturing)(Stream stream, CaptureStatus* status);
    Code (*thread_exchange_stream_capture_mode)(CaptureMode* mode);
    Code (*graph_instantiate_with_flags)(GraphExecHandle* exec, GraphHandle graph, unsigned long long flags);
    Code (*graph_launch)(GraphExecHandle exec, Stream stream);
    Code (*graph_destroy)(GraphHandle graph);
    Code (*graph_exec_destroy)(GraphExecHandle exec);
    [[nodiscard]] bool has_graphs() const { return graph_exec_destroy != nullptr; }

    /// The driver's cuCtxGetCurrent: null for a thread that has worked on no device yet. May be missing.
    Code (*current_context)(ContextObject** context);

    /// "out of memory (CUDA error 2): the device's memory is full: ...": CUDA's words, and what to do.
    [[nodiscard]] std::string explain(Code code) const;
    /// Throws ddp::Error "<attempt>: <CUDA's explanation>" unless the code is Success. A failure is told
    /// here, and is not the thread's last error any more.
    void check(Code code, const char* attempt) const;
    /// Whether a call that may be refused was not. A refusal is not left behind either: the program would
    /// find it with its own cudaGetLastError, and blame its last launch.
    [[nodiscard]] bool succeeded(Code code) const;
};

/// For the life of this object the calling thread's CUDA calls are for that device: events, memory and the
/// default stream belong to the one that is current. Costs next to nothing when it is the current one anyway.
/// A thread that never worked on any device stays on this one: going back would make a context on device 0,
/// which costs hundreds of megabytes there, and is refused where another process has that device for itself.
class DeviceScope {
  public:
    /// Throws Error with CUDA's reason.
    DeviceScope(const Api& api, int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    const Api& api_;
    int before_ = 0;
    bool goes_back_ = false;
};

/// DDP_CUDART_LIBRARY, else libcudart.so.13, .12, .11.0. Error: NotFound, Mismatch naming what it lacks.
ddprun::Result<Api> load_api();
ddprun::Result<Api> api_from(const SharedLibrary& library);

enum class Priority : std::uint8_t { Normal, High };
/// A stream on the thread's device that does not wait for the default stream. The caller destroys it. Throws
/// Error, beginning with `attempt`.
Stream make_stream(const Api& api, Priority priority, const char* attempt);

/// A point in a stream. Thread-safe as CUDA's events are.
class Event {
  public:
    /// `flags`: kEventDefault where elapsed_since is wanted.
    explicit Event(std::shared_ptr<const Api> api, unsigned flags = kEventDisableTiming);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(Stream stream) const;
    /// Work that `stream` is given from now on begins after this point.
    void hold_back(Stream stream) const;
    /// Success, NotReady, or what went wrong on the device. NotReady is no error of the thread's afterwards.
    [[nodiscard]] Code query() const;
    /// Blocks until the last recording is reached. Throws Error with what went wrong on the device.
    void synchronize() const;
    /// Of two recordings that were reached. Throws Error.
    [[nodiscard]] double milliseconds_since(const Event& earlier) const;

  private:
    std::shared_ptr<const Api> api_;
    EventHandle event_ = nullptr;
};

}  // namespace ddp::cuda
