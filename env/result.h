#pragma once

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace ddprun {

/// The kind of a failure. Callers branch on it; people read `Error::what`.
enum class Errc {
    System,           ///< a system call failed; `Error::sys` holds errno
    InvalidArgument,  ///< a value from a user or peer is malformed
    NotFound,         ///< the named thing does not exist
    Timeout,          ///< the deadline passed
    Closed,           ///< the peer went away
    Refused,          ///< the peer answered with a refusal (authentication, limits)
    StaleGeneration,  ///< the message belongs to a generation that is over
    Mismatch,         ///< two parties disagree; `what` shows both sides
    Protocol,         ///< the peer sent something the protocol does not allow
    Limit,            ///< a limit named in the code was hit
};

/// A failure as a value. `what` names the object and the attempt ("connect node07:29400: Connection
/// refused").
struct Error {
    Errc code = Errc::System;
    std::string what;
    int sys = 0;  ///< errno where code is System, else 0

    /// The same error with a context: "<context>: <what>".
    [[nodiscard]] Error with(std::string_view context) const {
        return {code, std::string(context) + ": " + what, sys};
    }
    /// "<attempt>: <strerror(errno_value)>". Reads errno at the call by default.
    [[nodiscard]] static Error system(std::string_view attempt, int errno_value = errno) {
        return {Errc::System, std::string(attempt) + ": " + ::strerror(errno_value), errno_value};
    }
    /// Errors of malformed values: from a user, and from a peer or another program.
    [[nodiscard]] static Error invalid(std::string what) {
        return {Errc::InvalidArgument, std::move(what), 0};
    }
    [[nodiscard]] static Error protocol(std::string what) { return {Errc::Protocol, std::move(what), 0}; }
    bool operator==(const Error&) const = default;
};

/// A value or an Error. Test it, then use `*result`; using the value of a failed result is a bug of ours.
template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit on purpose
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit on purpose

    [[nodiscard]] bool has_value() const { return state_.index() == 0; }
    explicit operator bool() const { return has_value(); }

    T& operator*() & { return std::get<0>(state_); }
    const T& operator*() const& { return std::get<0>(state_); }
    T&& operator*() && { return std::get<0>(std::move(state_)); }
    T* operator->() { return &std::get<0>(state_); }
    const T* operator->() const { return &std::get<0>(state_); }

    [[nodiscard]] const Error& error() const { return std::get<1>(state_); }
    [[nodiscard]] T value_or(T other) && {
        return has_value() ? std::get<0>(std::move(state_)) : std::move(other);
    }

  private:
    std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
  public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit on purpose

    [[nodiscard]] bool has_value() const { return !error_; }
    explicit operator bool() const { return has_value(); }
    [[nodiscard]] const Error& error() const { return *error_; }

  private:
    std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace ddprun
