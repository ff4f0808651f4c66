#pragma once

#include <cstddef>
#include <string>

/// Stacks of the calling thread, as text with one frame per line:
///
///     #3 train::Trainer::run(std::string const&) [/opt/train+0x41f2]
///
/// Functions that are not exported have no name (link with -rdynamic to export them); addr2line takes the offset.
namespace ddp {

/// With readable C++ names. Leaves out the `skip` innermost frames, besides its own.
std::string stack_trace(int skip = 0);

/// The same with mangled names, async-signal-safe once prepare_stack_trace() has been called. Writes at most
/// `size` bytes and returns how many.
std::size_t raw_stack_trace(char* text, std::size_t size);

/// Loads what the unwinder needs; the first trace would otherwise allocate memory.
void prepare_stack_trace();

}  // namespace ddp
