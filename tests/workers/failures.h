#pragma once

#include <exception>
#include <string>

/// The exceptions of ranks, as failures_of_ranks returns them.
namespace ddp::testing {

/// The message of an exception; "" for none.
inline std::string message_of(const std::exception_ptr& failure) {
    try {
        if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

template <class Exception>
bool is(const std::exception_ptr& failure) {
    try {
        if (failure) std::rethrow_exception(failure);
    } catch (const Exception&) {
        return true;
    } catch (...) {
    }
    return false;
}

}  // namespace ddp::testing
