// The kernels of libddp and train, compiled for the host.
#include "tests/support/fake_nccl/host_launch.h"
// Behind it: they use its launches.
#include "ddp/cuda/kernels.cu"
#include "train/train_kernels.cu"
