#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <vector>

#include "ddp/types.h"

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

/// The exception of a call: "InvalidInput: ...", "Error: ...".
template <class Call>
std::string thrown_by(const Call& call) {
    try {
        call();
    } catch (const ddp::InvalidInput& error) {
        return std::string("InvalidInput: ") + error.what();
    } catch (const ddp::Error& error) {
        return std::string("Error: ") + error.what();
    } catch (const std::exception& error) {
        return std::string("no ddp::Error: ") + error.what();
    }
    return "nothing";
}

inline void expect_all_well(const std::vector<std::exception_ptr>& failures) {
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
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
