// {fmt}'s functions, compiled from its headers into our own static library: Debian ships it only as a shared
// one, which would pull in a shared libstdc++ as well, and a program that loads neither starts a millisecond
// sooner.
#include <fmt/format-inl.h>

// Declared in the headers, and instantiated nowhere else.
template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl<char>(
    fmt::detail::locale_ref);
template char fmt::detail::decimal_point_impl<char>(fmt::detail::locale_ref);
template fmt::detail::dragonbox::decimal_fp<float> fmt::detail::dragonbox::to_decimal(float) noexcept;
template fmt::detail::dragonbox::decimal_fp<double> fmt::detail::dragonbox::to_decimal(double) noexcept;
