#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// The shared libraries that an ELF file names itself (DT_NEEDED), "libmpi.so.40": not those of its
/// libraries. Of what is no ELF file of this machine's kind: none. Pure.
std::vector<std::string> needed_libraries(std::string_view file);
/// The same of the file at this path; none where it cannot be read.
std::vector<std::string> needed_libraries_of(const std::string& path);

/// Whether the workers get a PMIx server, as far as the program tells.
struct PmixWish {
    bool wanted = false;
    std::string why;  ///< "the program is linked with libmpi.so.40"
    std::string warning =
        {};  ///< why its ranks will not find each other, and what to do; "" nothing is known to keep them
};
/// A server costs a start some 20 ms, so Auto wants one only where the program itself is linked with an MPI
/// that speaks PMIx, or with PMIx. What a script starts, or Python imports, is not seen: that is what --pmix
/// on is for. Nor where the workers are to speak with the launcher around us (`passes_outer`:
/// --pass-mpi-env). Pure.
PmixWish decide_pmix(PmixUse use, const std::vector<std::string>& needed, bool passes_outer);
/// The same, by what the program at this path is linked with.
PmixWish decide_pmix(const JobSpec& spec, const std::string& program);

/// What to say of a worker without a PMIx server, by the text of its /proc/PID/maps: "" where no MPI is
/// loaded. Pure.
std::string explain_loaded_mpi(std::string_view maps);

}  // namespace ddprun
