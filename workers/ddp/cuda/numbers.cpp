#include "ddp/cuda/numbers.h"

namespace ddp::device {

void to_floats(ElementType type, const void* from, float* to, std::size_t count) {
    with_type(type, [&]<class T>(T) {
        for (std::size_t i = 0; i < count; ++i) to[i] = to_float(static_cast<const T*>(from)[i]);
    });
}

void round_floats(const float* from, ElementType type, void* to, std::size_t count) {
    with_type(type, [&]<class T>(T) {
        for (std::size_t i = 0; i < count; ++i) round_to(from[i], static_cast<T*>(to)[i]);
    });
}

}  // namespace ddp::device
