#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/process_group.h"
#include "env/clock.h"

namespace train {

/// Exit codes of sysexits.h, as far as train uses them.
enum class ExitCode : std::uint8_t {
    Ok = 0,
    Failed = 1,
    Usage = 64,
    DataError = 65,
    NoInput = 66,
    Unavailable = 69,
    CannotCreate = 73
};

/// Something that keeps training from starting, and the one line about it.
struct Trouble {
    ExitCode code = ExitCode::Failed;
    std::string what;
};

/// Trouble of the whole world, as every rank knows it.
struct AgreedTrouble {
    Trouble trouble;
    int reporter = 0;  ///< the rank that prints it, once for all
};

/// What must be the same on all ranks.
struct Common {
    ddp::NamedValue data;                   ///< what was read, wherever it lies
    std::vector<ddp::NamedValue> settings;  ///< by the name of the option that makes them
};

/// Collective: is anyone in trouble? Then nobody starts, everyone ends with the same code, and one rank says
/// why, naming itself when the others are well. Ranks that differ in what must be the same are in trouble
/// too.
std::optional<AgreedTrouble> agree(ddp::ProcessGroup& group, const std::optional<Trouble>& mine,
                                   const Common& common);

/// Collective: everyone's numbers, by rank. As bytes: it works wherever the group's buffers have to be.
template <std::size_t N>
std::vector<std::array<double, N>> gather_numbers(ddp::ProcessGroup& group,
                                                  const std::array<double, N>& mine) {
    // Alone there is nobody to ask, and on a GPU to ask is to wait for the device.
    if (group.size() == 1) return {mine};
    std::vector<std::array<double, N>> all;
    const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), sizeof(mine));
    for (const std::string& theirs : group.all_gather_bytes(bytes))
        std::memcpy(all.emplace_back().data(), theirs.data(), sizeof(mine));
    return all;
}

/// Lets all ranks stop after the same step although each hears of it at its own time: now and then they ask
/// each other. Steps between two votes are so many that a vote comes about five times a second, as the
/// slowest rank counts; the number is part of the vote, so that all ranks count alike.
class StopVote {
  public:
    /// `wanted` is asked at every vote; empty: nobody ever wants to stop, and nothing is sent. The same on
    /// all ranks. Borrows the group.
    StopVote(ddp::ProcessGroup& group, std::function<bool()> wanted);

    /// Collective, at every step. True on all ranks from the vote on in which one rank wanted to stop.
    bool passed();

  private:
    void vote();

    ddp::ProcessGroup& group_;
    std::function<bool()> wanted_;
    bool passed_ = false;
    std::uint64_t steps_left_ = 1;
    std::uint64_t steps_between_ = 1;
    ddprun::TimePoint last_vote_;
};

}  // namespace train
