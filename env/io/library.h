#pragma once

#include <dlfcn.h>

namespace ddprun {

/// Restores the process's signal dispositions after foreign libraries have loaded or started, because some
/// install handlers in a constructor. libinfinipath, which Debian's and Ubuntu's libfabric needs, takes
/// SIGTERM, SIGSEGV and others, ends the process by exit(1) and leaves a .btr file.
///
/// Several may live at once, in any threads: the first saves the dispositions, the last restores them. A
/// handler that another thread installs meanwhile is lost.
class KeptSignals {
  public:
    KeptSignals();
    ~KeptSignals();
    KeptSignals(const KeptSignals&) = delete;
    KeptSignals& operator=(const KeptSignals&) = delete;
};

/// dlopen (RTLD_NOW, RTLD_LOCAL) under KeptSignals. Null: dlerror() has the reason.
void* load_library(const char* file);

/// dlsym. False when there is no such function; the pointer is then null.
template <class Function>
bool find_function(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    return function != nullptr;
}

}  // namespace ddprun
