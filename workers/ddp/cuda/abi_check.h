#pragma once

#include <type_traits>

/// Compares our declarations of a foreign interface with its own header, at compile time.
namespace ddp {

/// True for two types that are passed the same way: pointers match pointers, numbers have one size and kind.
template <class Ours, class Theirs>
constexpr bool same_value =
    sizeof(Ours) == sizeof(Theirs) &&
    std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>&& std::is_class_v<Ours> == std::is_class_v<Theirs>;
template <>
inline constexpr bool same_value<void, void> = true;

template <class Ours, class Theirs>
constexpr bool same_call = false;
template <class R, class... A, class S, class... B>
requires(sizeof...(A) ==
         sizeof...(B)) constexpr bool same_call<R (*)(A...), S (*)(B...)> = same_value<R, S> &&
                                                                            (same_value<A, B> && ...);

}  // namespace ddp
