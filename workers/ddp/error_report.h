#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ddp {

/// Runs `body` as the program's real main and returns its value, as torch's @record does for Python.
///
/// Any other end of the process leaves an error report in TORCHELASTIC_ERROR_FILE (where ddprun, or torchrun,
/// picks it up for its own report) and one line on stderr:
///
/// - an exception that leaves `body`: "<program>: rank 3: <what>", then exit code 1. The stack is not
/// unwound, so that the trace shows the throw: no destructor runs, but stdio is flushed. main must not catch
/// the exception around this call;
/// - std::terminate elsewhere, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT: the process then dies of that
/// signal, as it would without run_main, with its core file.
///
/// Without that variable only the line is written. Signal handlers that the program installed before the call
/// are left alone. Call it once, from the main thread.
[[nodiscard]] int run_main(std::string_view program, const std::function<int()>& body);

/// Writes a report of an error that the program handles itself before it exits. False when there is no error
/// file, or it cannot be written.
bool write_error_report(std::string_view message, std::string_view stack = {});

}  // namespace ddp
