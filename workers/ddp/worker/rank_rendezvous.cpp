#include "ddp/worker/rank_rendezvous.h"

#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>

#include "ddp/worker/job_store.h"
#include "env/hmac.h"
#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/nodes/meeting_point.h"
#include "env/text.h"
#include "rendezvous/client/store_client.h"
#include "rendezvous/serve/store_service.h"

namespace ddp {

namespace {

using ddprun::Endpoint;
using ddprun::EnvironmentLookup;
using ddprun::Errc;
using ddprun::Exchange;
using ddprun::ExchangeChoice;
using ddprun::LauncherChoice;
using ddprun::MeetingPoint;
using ddprun::MonotonicClock;
using ddprun::Placement;
using ddprun::Result;
using ddprun::Status;
using ddprun::TimePoint;
using ddprun::rdzv::StoreClient;
using ddprun::rdzv::StoreHost;

constexpr std::chrono::seconds kRendezvousTimeout{120};

Result<TimePoint> deadline_in(const EnvironmentLookup& lookup) {
    const std::optional<std::string> limit = lookup("DDPRUN_EXCHANGE_TIMEOUT");
    if (!limit) return ddprun::deadline_after(MonotonicClock::now(), kRendezvousTimeout);
    const Result<ddprun::Duration> span = ddprun::parse_duration(*limit);
    if (!span) return ddprun::Error{Errc::InvalidArgument, "DDPRUN_EXCHANGE_TIMEOUT=" + span.error().what, 0};
    return ddprun::deadline_after(MonotonicClock::now(), *span);
}

/// Rank 0's store, which listens before its address is sent, and that address.
struct Hosting {
    std::unique_ptr<StoreHost> store;
    MeetingPoint point;
};

Result<Hosting> host_store(const Placement& placement, const EnvironmentLookup& lookup) {
    Result<ddprun::Listener> listener = ddprun::listen_tcp({"", 0});
    if (!listener) return listener.error();
    const Result<std::string> token = ddprun::random_hex(16), number = ddprun::random_hex(4);
    if (!token || !number) return token ? number.error() : token.error();
    Hosting hosting;
    hosting.point.token = *token;
    hosting.point.job = fmt::format("{}-{}{}{}", name_of(placement.family), placement.job,
                                    placement.job.empty() ? "" : "-", *number);
    hosting.point.port = listener->bound.port;
    hosting.point.addresses =
        ddprun::reachable_addresses(ddprun::list_interfaces(), lookup("NCCL_SOCKET_IFNAME").value_or(""));
    if (hosting.point.addresses.empty()) {
        return ddprun::Error{Errc::NotFound,
                             "no interface of rank 0's host has an address that the other ranks could reach",
                             0};
    }
    Result<std::unique_ptr<StoreHost>> store = StoreHost::start(
        std::move(listener->fd), {{hosting.point.job, *token}, {}, {}, store_client_name(0)});
    if (!store) return store.error();
    hosting.store = *std::move(store);
    return hosting;
}

/// Claims this rank, which fails when another process has it, and waits for all ranks.
Status join_in_store(StoreClient& store, const Placement& placement, TimePoint deadline) {
    const int rank = placement.rank.value_or(0), size = placement.size.value_or(1);
    const std::string mine =
        fmt::format("{} pid {} ({})", ddprun::host_name(), ::getpid(), describe(placement));
    const Result<StoreClient::Exchange> claimed =
        store.compare_set(fmt::format("meeting/rank/{}", rank), std::nullopt, mine);
    if (!claimed) return claimed.error();
    if (!claimed->swapped) {
        return ddprun::Error{Errc::Mismatch,
                             fmt::format("rank {} is there twice: {} and {}", rank, claimed->value, mine), 0};
    }
    return store.barrier("meeting", size, deadline);
}

/// Resources that live until the process ends.
struct Kept {
    std::unique_ptr<StoreHost> store;  ///< rank 0's; the other ranks need it as long as rank 0 lives
    std::unique_ptr<Exchange>
        exchange;  ///< a process that closes it cannot open another one with the launcher, nor call MPI_Init
};

Result<RankRendezvous> rendezvous_over(const ExchangeChoice& choice, const Placement& placement,
                                       const EnvironmentLookup& lookup, Kept& kept) {
    const Result<TimePoint> deadline = deadline_in(lookup);
    if (!deadline) return deadline.error();
    std::optional<MeetingPoint> mine;
    if (placement.rank == 0) {
        Result<Hosting> hosting = host_store(placement, lookup);
        if (!hosting) return hosting.error();
        mine = hosting->point;
        kept.store = std::move(hosting->store);
    }
    Result<std::unique_ptr<Exchange>> opened = open_exchange(choice, placement, lookup, *deadline);
    if (!opened) return opened.error();
    std::unique_ptr<Exchange> exchange = *std::move(opened);
    Result<ddprun::Gathered> gathered =
        ddprun::gather(*exchange, placement, mine, ddprun::WhoIsWhere::Needed);
    if (!gathered) return gathered.error();
    MeetingPoint point = gathered->meeting;
    if (mine) point.addresses = {"127.0.0.1"};  // rank 0 uses the loopback
    ddprun::rdzv::ClientOptions options;
    options.name = fmt::format("rank {} on {}", placement.rank.value_or(0), ddprun::host_name());
    Result<ddprun::rdzv::Reached> reached = ddprun::rdzv::reach(*exchange, point, options, *deadline);
    if (!reached) return reached.error().with(fmt::format("rank 0's store (told by {})", choice.why));
    if (const Status met = join_in_store(*reached->client, gathered->placement, *deadline); !met)
        return met.error();
    const Endpoint where{mine ? mine->addresses.front() : reached->endpoint.host, point.port};
    RankRendezvous meeting{
        gathered->placement, {}, fmt::format("they meet at {} (told by {})", to_string(where), choice.why)};
    meeting.variables = {
        {"DDPRUN_STORE", "tcp:" + to_string(mine ? Endpoint{"127.0.0.1", point.port} : where)},
        {"DDPRUN_TOKEN", point.token},
        {"TORCHELASTIC_RUN_ID", point.job},
        {"MASTER_ADDR", where.host},
        {"MASTER_PORT", fmt::format("{}", where.port)}};
    if (choice.kind != ExchangeChoice::Kind::File) kept.exchange = std::move(exchange);
    return meeting;
}

Result<RankRendezvous> rendezvous_once(const LauncherChoice& launcher, const EnvironmentLookup& lookup,
                                       Kept& kept) {
    const Result<ExchangeChoice> offered = choose_exchange(launcher, lookup);
    if (!offered) return offered.error();
    std::error_code failed;
    const std::string here = std::filesystem::current_path(failed);
    const ExchangeChoice choice = failed ? *offered : or_file_in(*offered, launcher, lookup, here);
    if (choice.kind == ExchangeChoice::Kind::None) {
        return ddprun::Error{
            Errc::NotFound,
            fmt::format(
                "{}: its ranks are on several hosts, or may be, and no channel carries the rendezvous address: {} (start "
                "them with ddprun, or set DDPRUN_EXCHANGE_DIR to a directory that all hosts share)",
                describe(*launcher.placement), choice.why),
            0};
    }
    return rendezvous_over(choice, *launcher.placement, lookup, kept);
}

}  // namespace

bool needs_rendezvous(const Placement& placement) {
    return placement.size.value_or(1) > 1 && placement.local_size != placement.size;
}

Result<RankRendezvous> rendezvous_of_ranks(const LauncherChoice& launcher, const EnvironmentLookup& lookup) {
    // One result per process, because its launcher serves it once.
    static std::mutex mutex;
    static Kept kept;
    static std::optional<Result<RankRendezvous>> met;
    const std::lock_guard lock(mutex);
    if (!met) met.emplace(rendezvous_once(launcher, lookup, kept));
    return *met;
}

}  // namespace ddp
