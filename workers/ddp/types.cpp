#include "ddp/types.h"

namespace ddp {

const char* name_of(DType type) {
    switch (type) {
        case DType::F32:
            return "float32";
        case DType::F64:
            return "float64";
        case DType::I32:
            return "int32";
        case DType::I64:
            return "int64";
        case DType::BF16:
            return "bfloat16";
        case DType::F16:
            return "float16";
        case DType::U8:
            return "uint8";
    }
    return "unknown type";
}

const char* name_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::Sum:
            return "sum";
        case ReduceOp::Max:
            return "max";
        case ReduceOp::Min:
            return "min";
        case ReduceOp::Avg:
            return "avg";
    }
    return "unknown reduction";
}

}  // namespace ddp
