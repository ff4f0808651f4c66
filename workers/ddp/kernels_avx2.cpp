#define DDP_KERNELS kernels_avx2
#define DDP_KERNELS_NAME "avx2"
#define DDP_VECTOR_BYTES 32
#include "ddp/kernels_impl.h"
