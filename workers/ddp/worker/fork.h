#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

/// A forked child has the memory of its parent, but none of its threads, and must not speak for it on its
/// connections.
namespace ddp {

/// Generations of fork() between the first process that ran this program and the calling one. Two calls that
/// give the same number are of one process. Costs one load.
std::uint32_t fork_count();

/// Throws Error when the calling process was forked from the one in which fork_count() was `made_in`. `what`
/// is the object and its call, "rank 0: all_reduce".
void require_same_process(std::uint32_t made_in, std::string_view what);

/// Deletes in the process that made it; does nothing in a forked child, where a destructor would wait for
/// threads that the child does not have, or give back what the parent uses.
struct DeleteInMaker {
    std::uint32_t made_in = fork_count();
    template <class T>
    void operator()(T* object) const {
        if (made_in == fork_count()) delete object;
    }
};
template <class T>
using OwnedByMaker = std::unique_ptr<T, DeleteInMaker>;
template <class T, class... Arguments>
OwnedByMaker<T> make_owned(Arguments&&... arguments) {
    return OwnedByMaker<T>(new T(std::forward<Arguments>(arguments)...));
}

}  // namespace ddp
