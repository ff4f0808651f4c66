#include "env/nodes/exchange.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>

#include "env/nodes/pmix_source.h"
#include "env/text.h"

namespace ddprun {
namespace {

using Kind = ExchangeChoice::Kind;

/// The channels that the launcher offers.
struct Offers {
    bool has_pmix = false;
    int pmi_fd = -1;
    std::string directory;
    std::string job;
};

std::string job_of(const LauncherChoice& launcher) {
    return launcher.placement ? launcher.placement->job : std::string();
}

Offers offers_of(const LauncherChoice& launcher, const EnvironmentLookup& lookup) {
    Offers offers;
    offers.has_pmix = launcher.has_pmix && built_with_pmix();
    offers.pmi_fd = descriptor_of_launcher(lookup).value_or(-1);
    offers.directory = lookup("DDPRUN_EXCHANGE_DIR").value_or("");
    offers.job = job_of(launcher);
    return offers;
}

ExchangeChoice by_pmix() { return {Kind::Pmix, "PMIx", -1, ""}; }
ExchangeChoice by_pmi(int fd) { return {Kind::Pmi, fmt::format("PMI on descriptor {}", fd), fd, ""}; }
ExchangeChoice by_file(const std::string& directory) {
    return {Kind::File, fmt::format("a file in {}", directory), -1, directory};
}
ExchangeChoice by_nothing(std::string why) { return {Kind::None, std::move(why), -1, ""}; }

Error bad_wish(std::string_view wish, std::string_view why) {
    return {Errc::InvalidArgument, fmt::format("DDPRUN_EXCHANGE={}: {}", wish, why), 0};
}

Result<ExchangeChoice> as_wished(const std::string& wish, const Offers& offers) {
    if (wish == "none") return by_nothing("DDPRUN_EXCHANGE=none");
    if (wish == "pmix") {
        if (!built_with_pmix()) return bad_wish(wish, kNoPmix);
        if (!offers.has_pmix) return bad_wish(wish, "PMIX_NAMESPACE is not set: no PMIx server started us");
        return by_pmix();
    }
    if (wish == "pmi") {
        if (offers.pmi_fd < 0) return bad_wish(wish, "PMI_FD is not set to a descriptor");
        return by_pmi(offers.pmi_fd);
    }
    if (wish != "file") return bad_wish(wish, "expected pmix, pmi, file or none");
    if (offers.directory.empty())
        return bad_wish(wish, "DDPRUN_EXCHANGE_DIR names no directory that all nodes share");
    if (offers.job.empty())
        return bad_wish(wish, "the launcher gives no job id that would keep two jobs apart");
    return by_file(offers.directory);
}

}  // namespace

std::string nothing_offered(MissedPmix pmix, bool has_job_id, bool has_directory) {
    const std::string_view file = has_job_id ? "no DDPRUN_EXCHANGE_DIR"
                                  : has_directory
                                      ? "no job id that would keep two jobs apart in DDPRUN_EXCHANGE_DIR"
                                      : "no job id for a file";
    if (pmix == MissedPmix::NotBuilt)
        return fmt::format("the launcher has a PMIx server, but {}; there is no PMI_FD, and {}", kNoPmix,
                           file);
    return fmt::format("neither PMIx nor PMI_FD, and {}", file);
}

std::optional<int> descriptor_of_launcher(const EnvironmentLookup& lookup) {
    const std::optional<std::string> text = lookup("PMI_FD");
    if (!text) return std::nullopt;
    const Result<std::int64_t> number = parse_int_between(*text, 0, 1 << 20);
    return number ? std::optional(static_cast<int>(*number)) : std::nullopt;
}

Status check_exchange_word(std::string_view word, std::size_t max_bytes) {
    if (word.size() > max_bytes) {
        return Error{Errc::InvalidArgument,
                     fmt::format("a word of {} bytes, at most {}", word.size(), max_bytes), 0};
    }
    // In PMI '=' ends a name and a blank ends a value.
    const bool is_word = !word.empty() && std::all_of(word.begin(), word.end(),
                                                      [](char c) { return c > ' ' && c <= '~' && c != '='; });
    if (is_word) return {};
    return Error{Errc::InvalidArgument,
                 fmt::format("'{}' is no word (printable, no blank, no '=')", excerpt(word)), 0};
}

Result<ExchangeChoice> choose_exchange(const LauncherChoice& launcher, const EnvironmentLookup& lookup,
                                       ExchangeUse use) {
    const Offers offers = offers_of(launcher, lookup);
    const std::string wish = lookup("DDPRUN_EXCHANGE").value_or("");
    if (!wish.empty()) {
        Result<ExchangeChoice> wished = as_wished(wish, offers);
        const bool is_childs = wished && (wished->kind == Kind::Pmix || wished->kind == Kind::Pmi);
        if (is_childs && use == ExchangeUse::OnlyFiles)
            return bad_wish(wish, "--pass-mpi-env leaves it to the program");
        return wished;
    }
    if (use == ExchangeUse::Any) {
        const LauncherFamily family =
            launcher.placement ? launcher.placement->family : LauncherFamily::Torchrun;
        // Hydra inside another launcher leaves that one's PMIx variables set.
        const bool speaks_pmi = family == LauncherFamily::Pmi || family == LauncherFamily::Mvapich;
        if (speaks_pmi && offers.pmi_fd >= 0) return by_pmi(offers.pmi_fd);
        if (offers.has_pmix) return by_pmix();
        if (offers.pmi_fd >= 0) return by_pmi(offers.pmi_fd);
    }
    if (!offers.directory.empty() && !offers.job.empty()) return by_file(offers.directory);
    const MissedPmix missed =
        launcher.has_pmix && !built_with_pmix() ? MissedPmix::NotBuilt : MissedPmix::NotOffered;
    return by_nothing(nothing_offered(missed, !offers.job.empty(), !offers.directory.empty()));
}

ExchangeChoice or_file_in(ExchangeChoice choice, const LauncherChoice& launcher,
                          const EnvironmentLookup& lookup, std::string directory) {
    const bool is_forbidden = lookup("DDPRUN_EXCHANGE").value_or("") == "none";
    if (choice.kind != Kind::None || is_forbidden || job_of(launcher).empty()) return choice;
    return by_file(directory);
}

Result<std::unique_ptr<Exchange>> open_exchange(const ExchangeChoice& choice, const Placement& placement,
                                                const EnvironmentLookup& lookup, TimePoint deadline) {
    switch (choice.kind) {
        case Kind::Pmix: return open_pmix_exchange(placement.rank.value_or(0), deadline);
        case Kind::Pmi: return open_pmi_exchange(choice.pmi_fd, placement.rank.value_or(0), deadline);
        case Kind::File:
            return open_file_exchange(file_exchange_of(choice.directory, placement, lookup), deadline);
        case Kind::None: break;
    }
    return Error{Errc::NotFound, choice.why, 0};
}

namespace {

constexpr std::string_view kMeetingKey = "meeting";
constexpr std::string_view kHostKey = "host";

bool is_asked(const Placement& placement, WhoIsWhere who) {
    const bool lacks =
        !placement.local_rank || !placement.local_size || !placement.node_rank || !placement.nodes;
    return lacks && who == WhoIsWhere::Needed;
}

Status publish(Exchange& exchange, bool tells_host, const std::optional<MeetingPoint>& mine) {
    if (mine) {
        if (const Status put = exchange.put(kMeetingKey, encode(*mine)); !put) return put;
    }
    return !tells_host ? Status() : exchange.put(kHostKey, host_identity());
}

Status place_by_identity(Exchange& exchange, Placement& placement) {
    std::vector<std::string> hosts;
    for (int rank = 0; rank < placement.size.value_or(1); ++rank) {
        Result<std::string> host = exchange.get(rank, kHostKey);
        if (!host) return host.error();
        hosts.push_back(*std::move(host));
    }
    place_by_hosts(placement, hosts);
    return {};
}

}  // namespace

void place_by_hosts(Placement& placement, const std::vector<std::string>& host_of_rank) {
    const auto rank = static_cast<std::size_t>(placement.rank.value_or(0));
    const std::string& here = host_of_rank.at(rank);
    std::vector<std::string> nodes;
    for (const std::string& host : host_of_rank) {
        if (std::find(nodes.begin(), nodes.end(), host) == nodes.end()) nodes.push_back(host);
    }
    const auto until = host_of_rank.begin() + static_cast<std::ptrdiff_t>(rank);
    if (!placement.local_rank || !placement.local_size) {
        placement.local_rank = static_cast<int>(std::count(host_of_rank.begin(), until, here));
        placement.local_size = static_cast<int>(std::count(host_of_rank.begin(), host_of_rank.end(), here));
    }
    placement.node_rank = static_cast<int>(std::find(nodes.begin(), nodes.end(), here) - nodes.begin());
    placement.nodes = static_cast<int>(nodes.size());
}

Result<Gathered> gather(Exchange& exchange, const Placement& placement,
                        const std::optional<MeetingPoint>& mine, WhoIsWhere who) {
    const bool asks = is_asked(placement, who);
    if (const Status told = publish(exchange, asks, mine); !told) return told.error();
    if (const Status fenced = exchange.fence(); !fenced) return fenced.error();
    Gathered gathered{{}, placement};
    if (mine) {
        gathered.meeting = *mine;
    } else {
        Result<MeetingPoint> heard = ask_meeting_point(exchange);
        if (!heard) return heard.error();
        gathered.meeting = *std::move(heard);
    }
    if (asks) {
        if (const Status placed = place_by_identity(exchange, gathered.placement); !placed)
            return placed.error();
    }
    return gathered;
}

Result<MeetingPoint> ask_meeting_point(Exchange& exchange) {
    const Result<std::string> word = exchange.get(0, kMeetingKey);
    if (!word) return word.error();
    return decode_meeting_point(*word);
}

}  // namespace ddprun
