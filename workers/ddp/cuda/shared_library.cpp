#include "ddp/cuda/shared_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "env/io/library.h"

namespace ddp {

using ddprun::Errc;
using ddprun::Result;

Result<SharedLibrary> open_library(const std::vector<std::string>& names) {
    std::string why;
    for (const std::string& name : names) {
        if (void* handle = ddprun::load_library(name.c_str())) {
            return SharedLibrary{name, [handle](const char* entry) { return ::dlsym(handle, entry); }};
        }
        if (const char* reason = ::dlerror(); why.empty() && reason != nullptr) why = reason;
    }
    return ddprun::Error{Errc::NotFound, why};
}

std::vector<std::string> library_names(const char* variable, std::vector<std::string> defaults) {
    const char* path = std::getenv(variable);
    if (path != nullptr && *path != '\0') return {path};
    return defaults;
}

}  // namespace ddp
