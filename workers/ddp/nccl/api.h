#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "ddp/cuda/shared_library.h"
#include "ddp/types.h"

/// NCCL's binary interface: own declarations of its stable part, and a table filled at run time. One binary
/// runs with an old NCCL, a new one and none. abi_check.cpp compares all of this with nccl.h where that
/// header exists.
namespace ddp::nccl {

struct CommunicatorObject;
struct WindowObject;
using Handle = CommunicatorObject*;
using Window = WindowObject*;
using Stream = void*;  ///< cudaStream_t

enum class Code : int {
    Success = 0,
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
};
/// "ncclRemoteError", as the documentation spells it; "ncclResult 42" for unknown codes.
std::string name_of(Code code);

enum class Type : int { Int8, UInt8, Int32, UInt32, Int64, UInt64, Float16, Float32, Float64, BFloat16 };
enum class Op : int { Sum, Prod, Max, Min, Avg };
Type type_of(DType type);
Op op_of(ReduceOp op);

struct UniqueId {
    char internal[128];
};

/// The configuration as of 2.28; a library of another release reads `size` and `version` and takes the part
/// that it knows.
struct Config {
    std::size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 22800;
    int blocking = INT_MIN;  ///< INT_MIN and null: not set
    int cga_cluster_size = INT_MIN;
    int min_ctas = INT_MIN;
    int max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int split_share = INT_MIN;
    int traffic_class = INT_MIN;
    const char* comm_name = nullptr;
    int collnet_enable = INT_MIN;
    int cta_policy = INT_MIN;
    int shrink_share = INT_MIN;
    int nvls_ctas = INT_MIN;
    int channels_per_net_peer = INT_MIN;
    int nvlink_centric_sched = INT_MIN;
};

/// ncclCommSplit's color of a rank that gets no communicator.
inline constexpr int kNoColor = -1;

/// For comm_window_register: the same offset on all ranks, for NCCL's fastest kernels.
inline constexpr int kWindowSymmetric = 1;

/// The entry points. Those of the first group are never null; any of the others may be.
struct Api {
    std::string library;  ///< name of the loaded library, for messages
    int version = 0;      ///< 22809 is 2.28.9

    Code (*get_version)(int* version);
    Code (*get_unique_id)(UniqueId* id);
    Code (*comm_init_rank_config)(Handle* comm, int ranks, UniqueId id, int rank, Config* config);
    Code (*comm_get_async_error)(Handle comm, Code* error);
    Code (*comm_abort)(Handle comm);
    Code (*comm_finalize)(Handle comm);
    Code (*comm_destroy)(Handle comm);
    Code (*all_reduce)(const void* in, void* out, std::size_t count, Type, Op, Handle, Stream);
    Code (*broadcast)(const void* in, void* out, std::size_t count, Type, int root, Handle, Stream);
    Code (*reduce)(const void* in, void* out, std::size_t count, Type, Op, int root, Handle, Stream);
    Code (*all_gather)(const void* in, void* out, std::size_t count, Type, Handle, Stream);
    Code (*reduce_scatter)(const void* in, void* out, std::size_t count, Type, Op, Handle, Stream);
    Code (*send)(const void* in, std::size_t count, Type, int peer, Handle, Stream);
    Code (*recv)(void* out, std::size_t count, Type, int peer, Handle, Stream);
    Code (*group_start)();
    Code (*group_end)();
    const char* (*get_error_string)(Code code);

    const char* (*get_last_error)(Handle comm) = nullptr;
    Code (*all_to_all)(const void* in, void* out, std::size_t count, Type, Handle, Stream) = nullptr;
    Code (*gather)(const void* in, void* out, std::size_t count, Type, int root, Handle, Stream) = nullptr;
    Code (*scatter)(const void* in, void* out, std::size_t count, Type, int root, Handle, Stream) = nullptr;
    Code (*comm_init_rank_scalable)(Handle* comm, int ranks, int rank, int ids, UniqueId* id,
                                    Config* config) = nullptr;
    Code (*comm_split)(Handle comm, int color, int key, Handle* made, Config* config) = nullptr;
    Code (*mem_alloc)(void** address, std::size_t bytes) = nullptr;
    Code (*mem_free)(void* address) = nullptr;
    Code (*comm_register)(Handle comm, void* address, std::size_t bytes, void** handle) = nullptr;
    Code (*comm_deregister)(Handle comm, void* handle) = nullptr;
    Code (*comm_window_register)(Handle comm, void* address, std::size_t bytes, Window* window,
                                 int flags) = nullptr;
    Code (*comm_window_deregister)(Handle comm, Window window) = nullptr;

    /// "NCCL 2.28.9".
    [[nodiscard]] std::string describe() const;
    /// "remote process exited or there was a network error (ncclRemoteError): <the library's last error>".
    [[nodiscard]] std::string explain(Code code, Handle comm) const;
};

// The members of Api with their names in the library.
#define DDP_NCCL_REQUIRED(X)                         \
    X(get_version, ncclGetVersion)                   \
    X(get_unique_id, ncclGetUniqueId)                \
    X(comm_init_rank_config, ncclCommInitRankConfig) \
    X(comm_get_async_error, ncclCommGetAsyncError)   \
    X(comm_abort, ncclCommAbort)                     \
    X(comm_finalize, ncclCommFinalize)               \
    X(comm_destroy, ncclCommDestroy)                 \
    X(all_reduce, ncclAllReduce)                     \
    X(broadcast, ncclBroadcast)                      \
    X(reduce, ncclReduce)                            \
    X(all_gather, ncclAllGather)                     \
    X(reduce_scatter, ncclReduceScatter)             \
    X(send, ncclSend)                                \
    X(recv, ncclRecv)                                \
    X(group_start, ncclGroupStart)                   \
    X(group_end, ncclGroupEnd)                       \
    X(get_error_string, ncclGetErrorString)
#define DDP_NCCL_OPTIONAL(X)                             \
    X(get_last_error, ncclGetLastError)                  \
    X(all_to_all, ncclAlltoAll)                          \
    X(gather, ncclGather)                                \
    X(scatter, ncclScatter)                              \
    X(comm_init_rank_scalable, ncclCommInitRankScalable) \
    X(comm_split, ncclCommSplit)                         \
    X(mem_alloc, ncclMemAlloc)                           \
    X(mem_free, ncclMemFree)                             \
    X(comm_register, ncclCommRegister)                   \
    X(comm_deregister, ncclCommDeregister)               \
    X(comm_window_register, ncclCommWindowRegister)      \
    X(comm_window_deregister, ncclCommWindowDeregister)

/// Loads DDP_NCCL_LIBRARY, else libnccl.so.2. Error: NotFound, naming the library and the variable; Mismatch,
/// naming the missing entry points.
ddprun::Result<Api> load_api();
ddprun::Result<Api> api_from(const SharedLibrary& library);

}  // namespace ddp::nccl
