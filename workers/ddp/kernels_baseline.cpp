#define DDP_KERNELS kernels_baseline
#define DDP_KERNELS_NAME "baseline"
#define DDP_VECTOR_BYTES 16
#include "ddp/kernels_impl.h"
