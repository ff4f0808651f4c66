#define DDP_KERNELS kernels_avx512
#define DDP_KERNELS_NAME "avx512"
#define DDP_VECTOR_BYTES 64
#include "ddp/kernels_impl.h"
