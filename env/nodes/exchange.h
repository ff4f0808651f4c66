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

/// Of a key and of a value: words that every channel carries as they are. PMI has the least room.
inline constexpr std::size_t kMaxExchangeKey = 32;
inline constexpr std::size_t kMaxExchangeValue = 800;

/// What the processes that one launcher started tell each other before they are connected: a few short words.
///
/// One conversation per process, from its opening to the end of this object, which tells the launcher that we
/// are done. Every call blocks until the deadline given at the opening at most. Not thread-safe. Errors name
/// the channel: Timeout, Closed (the launcher's side went away), Protocol (it said what it must not),
/// InvalidArgument (a value that is no word), NotFound.
class Exchange {
  public:
    virtual ~Exchange() = default;
    Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    /// Says it to the others, who hear it after the fence: printable characters without blanks.
    virtual Status put(std::string_view key, std::string_view value) = 0;
    /// All processes of the launcher call it; what they have put before can then be had. A file waits for
    /// nobody here: its get does.
    virtual Status fence() = 0;
    virtual Result<std::string> get(int rank, std::string_view key) = 0;
    /// True: what was put can be had for as long as this object lives, and asking again may give something
    /// newer.
    [[nodiscard]] virtual bool keeps_what_was_put() const { return false; }
};

/// Pure. Error: InvalidArgument.
Status check_exchange_word(std::string_view word, std::size_t max_bytes);

struct ExchangeChoice {
    enum class Kind { None, Pmix, Pmi, File } kind = Kind::None;
    std::string why;  ///< "PMI on descriptor 6", "no channel: neither ... nor ..."
    int pmi_fd = -1;
    std::string directory;  ///< of File
};

/// What PMI_FD names: where the launcher speaks PMI with this process.
std::optional<int> descriptor_of_launcher(const EnvironmentLookup& lookup);

/// What ddprun or a program may use. A child that speaks MPI needs the launcher's channels for itself.
enum class ExchangeUse { Any, OnlyFiles };

/// Why PMIx carries nothing.
enum class MissedPmix : std::uint8_t { NotOffered, NotBuilt };
/// Why nothing carries the first words. Pure.
std::string nothing_offered(MissedPmix pmix, bool has_job_id, bool has_directory);

/// Pure: which channel the launcher that counts offers. DDPRUN_EXCHANGE=pmix, pmi, file or none overrides; a
/// file is taken by itself only where DDPRUN_EXCHANGE_DIR names a directory. Error: InvalidArgument naming
/// the variable, its value and the remedy.
Result<ExchangeChoice> choose_exchange(const LauncherChoice& launcher, const EnvironmentLookup& lookup,
                                       ExchangeUse use = ExchangeUse::Any);

/// Pure: the file in `directory` in place of no channel at all. None stays None, with the reason, where
/// nothing names the job.
ExchangeChoice or_file_in(ExchangeChoice choice, const LauncherChoice& launcher,
                          const EnvironmentLookup& lookup, std::string directory);

/// Begins the conversation for the rank that the launcher told. Error: as those of Exchange; Mismatch where
/// the channel knows us by another rank.
Result<std::unique_ptr<Exchange>> open_exchange(const ExchangeChoice& choice, const Placement& placement,
                                                const EnvironmentLookup& lookup, TimePoint deadline);

}  // namespace ddprun
