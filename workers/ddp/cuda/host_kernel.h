#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <tuple>
#include <utility>

/// How kernels that were compiled for the host are found and run: by the fake driver of the tests only.
namespace ddp::device {

/// The thread that a kernel is run as. Launches take turns (fake_driver.cpp), so one for all is enough.
struct HostThread {
    unsigned long long index = 0, count = 1;
};
inline HostThread host_thread;

/// A kernel, in the list of all that were linked. Made by DDP_KERNEL only.
class HostKernel {
  public:
    template <class... Arguments>
    HostKernel(const char* name, void (*kernel)(Arguments...))
        : name_(name), kernel_(reinterpret_cast<void (*)()>(kernel)), next_(first_) {
        bind_ = [](void (*erased)(), void** arguments) {
            const auto typed = reinterpret_cast<void (*)(Arguments...)>(erased);
            return bind_each(typed, arguments, std::index_sequence_for<Arguments...>{});
        };
        first_ = this;
    }
    /// Null when no kernel of that name was linked.
    static const HostKernel* find(std::string_view name) {
        const HostKernel* kernel = first_;
        while (kernel != nullptr && kernel->name_ != name) kernel = kernel->next_;
        return kernel;
    }
    [[nodiscard]] std::string_view name() const { return name_; }
    /// The call of one thread, with copies of the arguments that the pointers lead to.
    [[nodiscard]] std::function<void()> bind(void** arguments) const { return bind_(kernel_, arguments); }

  private:
    template <class... Arguments, std::size_t... I>
    static std::function<void()> bind_each(void (*kernel)(Arguments...), void** arguments,
                                           std::index_sequence<I...>) {
        return [kernel, copies = std::tuple<Arguments...>(*static_cast<Arguments*>(arguments[I])...)] {
            std::apply(kernel, copies);
        };
    }

    std::string_view name_;
    void (*kernel_)();
    std::function<void()> (*bind_)(void (*kernel)(), void** arguments);
    const HostKernel* next_;
    static inline const HostKernel* first_ = nullptr;
};

/// What the device's own conversion instructions do: to nearest even, NaN becomes 0x7FFF.
inline unsigned short float_to_bfloat16(float value) {
    const auto bits = __builtin_bit_cast(unsigned, value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FFF;
    return static_cast<unsigned short>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
inline unsigned short float_to_half(float value) {
    const auto bits = __builtin_bit_cast(unsigned, value);
    const auto sign = static_cast<unsigned short>((bits >> 16) & 0x8000U);
    const unsigned magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return 0x7FFF;
    if (magnitude >= 0x477FF000U)
        return static_cast<unsigned short>(sign | 0x7C00U);  // rounds to 65536 or more
    // Too small for a normal half: an addition whose last place is a half's smallest step does the rounding.
    if (magnitude < 0x38800000U) {
        const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
        return static_cast<unsigned short>(sign | (__builtin_bit_cast(unsigned, shifted) - 0x3F000000U));
    }
    const unsigned even = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    return static_cast<unsigned short>(sign | ((even - 0x38000000U) >> 13));
}

inline float half_to_float(unsigned short half) {
    const unsigned sign = (half & 0x8000U) << 16;
    const unsigned exponent = (half >> 10) & 0x1FU, fraction = half & 0x3FFU;
    if (exponent == 0x1F) return __builtin_bit_cast(float, sign | 0x7F800000U | fraction << 13);
    if (exponent == 0) {
        const float small = static_cast<float>(fraction) * 0x1p-24F;
        return (half & 0x8000U) != 0 ? -small : small;
    }
    return __builtin_bit_cast(float, sign | ((exponent + 112) << 23) | fraction << 13);
}

}  // namespace ddp::device
