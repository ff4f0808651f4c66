#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

/// A forked child has the memory of its parent but none of its threads, and must not use its connections.
namespace ddp {

/// The number of fork() calls between the first process that ran this program and the calling one: equal
/// results come from the same process. Costs one load.
std::uint32_t fork_count();

/// Throws Error when the calling process was forked from the one whose fork_count() was `made_in`. `what`
/// names the object and its call, "rank 0: all_reduce".
void require_same_process(std::uint32_t made_in, std::string_view what);

/// Deletes an object in the process that made it; does nothing in a forked child, where a destructor would
/// wait for threads that the child lacks, or free resources of the parent.
struct DeleteInProcess {
    std::uint32_t made_in = fork_count();
    template <class T>
    void operator()(T* object) const {
        if (made_in == fork_count()) delete object;
    }
};
template <class T>
using OwnedByProcess = std::unique_ptr<T, DeleteInProcess>;
template <class T, class... Arguments>
OwnedByProcess<T> make_owned(Arguments&&... arguments) {
    return OwnedByProcess<T>(new T(std::forward<Arguments>(arguments)...));
}

}  // namespace ddp
