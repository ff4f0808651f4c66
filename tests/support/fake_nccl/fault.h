#pragma once

#include <optional>
#include <string>
#include <vector>

namespace fake {

/// One entry of FAKE_NCCL: "RANK:WHERE:WHAT[:NUMBER]", entries separated by commas.
///
///   RANK   the rank that it is for
///   WHERE  "id", "init", "finalize", "abort", "split" (of this communicator), "window" or "buffer"
///          (registering memory), or the number of a collective, message or group of this communicator, from
///          1; with an "s" before it: in a communicator that was split off, RANK being the rank there
///   WHAT   fail   the call returns NUMBER
///          async  the call succeeds, the communicator's asynchronous error becomes NUMBER, nothing ends
///          early  window: the same, and it is there before the call has returned
///          hang   the call succeeds (abort: does not return) and what it began never ends
///          stuck  the call stays ncclInProgress
///          delay  what it began starts (abort: returns) NUMBER milliseconds late
///          null   window: it succeeds, and there is none
///          cuda   the device ends it with CUDA error NUMBER
struct Fault {
    int rank;
    std::string where;
    std::string what;
    int number;
};
std::vector<Fault> faults_from_environment();
std::optional<Fault> find(const std::vector<Fault>& faults, int rank, const std::string& where);

}  // namespace fake
