#pragma once

#include <functional>
#include <string>
#include <vector>

#include "env/result.h"

namespace ddp {

/// Finds an entry point by name; null when there is none. Tests pass their own to hide names.
using Resolve = std::function<void*(const char* name)>;

/// A library opened with dlopen: the first of `names` that opens. It is never closed: CUDA and NCCL have
/// threads and exit handlers of their own.
struct SharedLibrary {
    std::string name;
    Resolve resolve;
};
/// Error: NotFound with the loader's reason for the first name.
ddprun::Result<SharedLibrary> open_library(const std::vector<std::string>& names);

/// The names to open: the value of `variable` alone when it is set, else `defaults`.
std::vector<std::string> library_names(const char* variable, std::vector<std::string> defaults);

/// Fills `slot` with the entry point of that name. False, and null, when there is none.
template <class Function>
bool take(const Resolve& resolve, const char* name, Function*& slot) {
    slot = reinterpret_cast<Function*>(resolve(name));
    return slot != nullptr;
}

}  // namespace ddp
