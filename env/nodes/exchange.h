#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/nodes/launcher_env.h"
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

}  // namespace ddprun
