#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ddp {

/// What torch's @record does for Python: the program's real main. Runs `body` and returns its value.
///
/// Whatever else ends the process leaves an error report in TORCHELASTIC_ERROR_FILE (where ddprun, or
/// torchrun, picks it up for its own report) and one line on stderr:
///
/// - an exception that leaves `body`: "<program>: rank 3: <what>", then exit code 1. The stack is not
/// unwound, so
///   that the trace shows where it was thrown: no destructor runs, but stdio is flushed. main must not catch
///   it around this call;
/// - std::terminate elsewhere, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT: the process then dies of that
/// signal, as
///   it would have without us, with its core file.
///
/// Without that variable only the line is written. Handlers that the program installs itself are left alone
/// when they are there before the call. To be called once, from the main thread.
[[nodiscard]] int run_main(std::string_view program, const std::function<int()>& body);

/// Leaves a report of an error that the program handles itself before it exits. False: there is no error
/// file, or it cannot be written.
bool write_error_report(std::string_view message, std::string_view stack = {});

/// torch's error.json: {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": ...}}};
/// in extraInfo also the last "nccl_error" and "cuda_error" where there was one (device_error.h).
std::string error_json(std::string_view message, std::string_view stack, std::int64_t unix_seconds);

/// "rank 3: what", where the text does not begin like that already; without RANK in the environment the text
/// itself.
std::string with_rank(std::string_view what);

}  // namespace ddp
