// Replaces the code that nvcc makes of train_kernels.cu, in a build without CUDA.
#include "ddp/cuda/no_launch.h"
#include "train_kernels.cu"
