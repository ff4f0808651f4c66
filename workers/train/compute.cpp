#include "compute.h"

namespace train {

const char* name_of(Precision precision) {
    switch (precision) {
        case Precision::Fp32:
            return "fp32";
        case Precision::Tf32:
            return "tf32";
        case Precision::Bf16:
            return "bf16";
        case Precision::Fp16:
            return "fp16";
    }
    return "?";
}

}  // namespace train
