#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/meeting_point.h"
#include "env/result.h"

namespace ddprun {

/// Limits on keys and values, which every channel carries unchanged. PMI has the least room.
inline constexpr std::size_t kMaxExchangeKey = 32;
inline constexpr std::size_t kMaxExchangeValue = 800;

/// Carries a few short words between the processes of one launcher before they are connected.
///
/// One conversation per process, from its opening to the destructor, which tells the launcher that we are
/// done. Every call blocks at most until the deadline given at the opening. Not thread-safe. Errors name the
/// channel: Timeout, Closed (by the launcher), Protocol (a malformed answer), InvalidArgument (a value that
/// is no word), NotFound.
class Exchange {
  public:
    virtual ~Exchange() = default;
    Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    /// Publishes a value, printable characters without blanks, which others can get after the fence.
    virtual Status put(std::string_view key, std::string_view value) = 0;
    /// All processes of the launcher call it; values put before can then be read. With files only get()
    /// waits.
    virtual Status fence() = 0;
    virtual Result<std::string> get(int rank, std::string_view key) = 0;
    /// True when values can be read for as long as this object lives, and a second get() may return a newer
    /// value.
    [[nodiscard]] virtual bool keeps_what_was_put() const { return false; }
};

/// Checks that `word` is a word for an Exchange. Pure. Error: InvalidArgument.
Status check_exchange_word(std::string_view word, std::size_t max_bytes);

struct ExchangeChoice {
    enum class Kind { None, Pmix, Pmi, File } kind = Kind::None;
    std::string why;  ///< "PMI on descriptor 6", "no channel: neither ... nor ..."
    int pmi_fd = -1;
    std::string directory;  ///< of File
};

/// The descriptor in PMI_FD, on which the launcher serves PMI to this process; nullopt: none.
std::optional<int> descriptor_of_launcher(const EnvironmentLookup& lookup);

/// The channels that ddprun or a program may use. An MPI program needs the launcher's channels for itself.
enum class ExchangeUse { Any, OnlyFiles };

/// The reason why PMIx is not used.
enum class MissedPmix : std::uint8_t { NotOffered, NotBuilt };
/// The reason why there is no channel. Pure.
std::string nothing_offered(MissedPmix pmix, bool has_job_id, bool has_directory);

/// Chooses a channel of the chosen launcher. DDPRUN_EXCHANGE=pmix, pmi, file or none overrides; a file is
/// used by default only when DDPRUN_EXCHANGE_DIR names a directory. Pure. Error: InvalidArgument naming the
/// variable, its value and the remedy.
Result<ExchangeChoice> choose_exchange(const LauncherChoice& launcher, const EnvironmentLookup& lookup,
                                       ExchangeUse use = ExchangeUse::Any);

/// Replaces None by a file in `directory`; None stays, with the reason, when the job has no id. Pure.
ExchangeChoice or_file_in(ExchangeChoice choice, const LauncherChoice& launcher,
                          const EnvironmentLookup& lookup, std::string directory);

/// Begins the conversation for our rank in `placement`. Error: as those of Exchange; Mismatch when the
/// channel has another rank for us.
Result<std::unique_ptr<Exchange>> open_exchange(const ExchangeChoice& choice, const Placement& placement,
                                                const EnvironmentLookup& lookup, TimePoint deadline);

/// Fills in the node and the local rank that the launcher did not tell, from the host identities of all
/// ranks. Nodes are numbered in the order of their first ranks. Pure.
void place_by_hosts(Placement& placement, const std::vector<std::string>& host_of_rank);

/// The facts that each process of a launcher has after gather().
struct Gathered {
    MeetingPoint meeting;
    Placement placement;  ///< with the local rank and sizes, which some launchers do not tell
};

/// Needed: the processes are ranks, and exchange their hosts when the launcher does not tell local ranks or
/// node numbers. AsTold: there is one process per node, which does not need them.
enum class WhoIsWhere : std::uint8_t { Needed, AsTold };

/// Exchanges the meeting point and, if needed, the hosts. Collective. Rank 0 gives `mine`; the others get it.
Result<Gathered> gather(Exchange& exchange, const Placement& placement,
                        const std::optional<MeetingPoint>& mine, WhoIsWhere who);

/// Asks again, after a meeting point that led nowhere, on a channel that keeps values.
Result<MeetingPoint> ask_meeting_point(Exchange& exchange);

/// Files in a directory that all nodes see, one per rank, for launchers without a channel (plain srun, PALS).
struct FileExchange {
    std::string directory;
    std::string job;  ///< part of the file names: letters, digits, '.', '_', '-'
    int rank = 0;
    int size = 1;
    /// Begin of the job by the scheduler, in seconds since 1970; older files are of an earlier run. 0: not
    /// known.
    std::int64_t began = 0;
};

/// The file exchange of this process's job, with its begin by SLURM_JOB_START_TIME, else the age of
/// PBS_NODEFILE.
FileExchange file_exchange_of(std::string directory, const Placement& placement,
                              const EnvironmentLookup& lookup);

/// Writes nothing before the fence. The file is complete when it has its name, only we can read it, and the
/// destructor removes it. Files of other users are refused.
Result<std::unique_ptr<Exchange>> open_file_exchange(FileExchange exchange, TimePoint deadline);

/// PMI-1's text protocol on the descriptor that PMI_FD names: Hydra, Intel MPI, MVAPICH under hydra, Flux,
/// srun --mpi=pmi2. No library. The descriptor stays open and is not owned; after the conversation the
/// launcher serves nothing on it.
Result<std::unique_ptr<Exchange>> open_pmi_exchange(int fd, int rank, TimePoint deadline);

}  // namespace ddprun
