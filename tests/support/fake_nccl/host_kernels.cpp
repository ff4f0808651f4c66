// The kernels of libddp and train, compiled for the host.
#include "tests/support/fake_nccl/host_launch.h"
// The kernels use the launches of the header above.
#include "ddp/cuda/kernels.cu"
#include "train/train_kernels.cu"
