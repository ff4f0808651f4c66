#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The shared libraries that an ELF file itself needs (DT_NEEDED), "libmpi.so.40"; not those of its
/// libraries. Empty when `file` is no ELF file of this machine's kind. Pure.
std::vector<std::string> needed_libraries(std::string_view file);
/// Reads the file at this path and calls needed_libraries(); empty when it cannot be read.
std::vector<std::string> needed_libraries_of(const std::string& path);

/// The decision whether the workers get a PMIx server.
struct PmixWish {
    bool wanted = false;
    std::string why;           ///< "the program is linked with libmpi.so.40"
    std::string warning = {};  ///< why the ranks will not find each other, and the remedy; "" none
};
/// A server costs a start some 20 ms, so Auto wants one only when the program itself is linked with an MPI
/// that speaks PMIx, or with PMIx. It does not see programs that a script starts or libraries that Python
/// imports: --pmix on is for these. With `passes_outer` (--pass-mpi-env) workers use the outer launcher's
/// server. Pure.
PmixWish decide_pmix(PmixUse use, const std::vector<std::string>& needed, bool passes_outer);
/// Reads the libraries of the program at this path and decides.
PmixWish decide_pmix(const JobSpec& spec, const std::string& program);

/// The warning for a worker without a PMIx server, from the text of its /proc/PID/maps; "" when no MPI is
/// loaded. Pure.
std::string explain_loaded_mpi(std::string_view maps);

}  // namespace ddprun
