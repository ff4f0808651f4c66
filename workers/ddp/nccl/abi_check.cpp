// Compiled where nccl.h exists; its only result are errors.
#include <nccl.h>

#include "ddp/cuda/abi_check.h"
#include "ddp/nccl/api.h"

namespace ddp::nccl {

static_assert(NCCL_MAJOR == 2);

#define SAME_VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
SAME_VALUE(Code::Success, ncclSuccess);
SAME_VALUE(Code::UnhandledCudaError, ncclUnhandledCudaError);
SAME_VALUE(Code::SystemError, ncclSystemError);
SAME_VALUE(Code::InternalError, ncclInternalError);
SAME_VALUE(Code::InvalidArgument, ncclInvalidArgument);
SAME_VALUE(Code::InvalidUsage, ncclInvalidUsage);
SAME_VALUE(Code::RemoteError, ncclRemoteError);
SAME_VALUE(Code::InProgress, ncclInProgress);
SAME_VALUE(Type::UInt8, ncclUint8);
SAME_VALUE(Type::Int32, ncclInt32);
SAME_VALUE(Type::Int64, ncclInt64);
SAME_VALUE(Type::Float16, ncclFloat16);
SAME_VALUE(Type::Float32, ncclFloat32);
SAME_VALUE(Type::Float64, ncclFloat64);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 10, 0)
SAME_VALUE(Type::BFloat16, 9);
#endif
SAME_VALUE(Op::Sum, ncclSum);
SAME_VALUE(Op::Max, ncclMax);
SAME_VALUE(Op::Min, ncclMin);
SAME_VALUE(Op::Avg, ncclAvg);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

#define SAME_CALL(ours, theirs) static_assert(same_call<decltype(Api::ours), decltype(&theirs)>);
DDP_NCCL_REQUIRED(SAME_CALL)

// Newer than the oldest NCCL that we support: checked where the header has them.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
static_assert(sizeof(Config) == sizeof(ncclConfig_t));
#define SAME_FIELD(ours, theirs) static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs))
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
SAME_FIELD(comm_name, commName);
SAME_FIELD(cta_policy, CTAPolicy);
SAME_FIELD(nvlink_centric_sched, nvlinkCentricSched);
SAME_VALUE(kNoColor, NCCL_SPLIT_NOCOLOR);
SAME_VALUE(kWindowSymmetric, NCCL_WIN_COLL_SYMMETRIC);
DDP_NCCL_OPTIONAL(SAME_CALL)
#endif

}  // namespace ddp::nccl
