// {fmt}'s functions, compiled from its headers into our own static library. Debian has only a shared library,
// which would load a shared libstdc++, too; a program without both starts a millisecond sooner.
#include <fmt/format-inl.h>

// These are declared in the headers, and instantiated nowhere else.
template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl<char>(
    fmt::detail::locale_ref);
template char fmt::detail::decimal_point_impl<char>(fmt::detail::locale_ref);
template fmt::detail::dragonbox::decimal_fp<float> fmt::detail::dragonbox::to_decimal(float) noexcept;
template fmt::detail::dragonbox::decimal_fp<double> fmt::detail::dragonbox::to_decimal(double) noexcept;
