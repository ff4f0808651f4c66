#include "ddp/trace/trace.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "ddp/types.h"
#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddp::trace {

using ddprun::TraceHeader;
using ddprun::TraceRecord;

/// The mapped file, and the place of this process in its job. It stays mapped to the end of the process: any
/// thread may be inside a span.
struct Ring {
    TraceHeader* header;
    TraceRecord* records;
    std::atomic<std::uint64_t> world;
    std::atomic<std::uint32_t> rank, generation;
    std::atomic<std::uint16_t> group;
};

constinit std::atomic<Ring*> ring = nullptr;

namespace {

[[noreturn]] void fail(const std::string& file, int error, int rank) {
    throw FileError(fmt::format(
        "rank {}: trace file {}: {}; a rank needs {}: name a directory with room that this user can write "
        "(ddprun --trace, DDP_TRACE), or run without a trace",
        rank, file, std::strerror(error), ddprun::format_bytes(ddprun::kTraceBytes)));
}

template <std::size_t kSize>
void copy_text(char (&to)[kSize], std::string_view text) {
    std::size_t length = std::min(text.size(), kSize - 1);
    while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;  // whole characters
    text.copy(to, length);
    to[length] = '\0';
}

/// Allocates all of the file, so that a full disk is an error here and no SIGBUS later.
std::byte* make_file(const std::string& path, int rank) {
    const ddprun::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd) fail(path, errno, rank);
    int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(ddprun::kTraceBytes));
    void* memory = MAP_FAILED;
    if (error == 0) {
        memory = ::mmap(nullptr, ddprun::kTraceBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        if (memory == MAP_FAILED) error = errno;
    }
    if (error == 0) return static_cast<std::byte*>(memory);
    ::unlink(path.c_str());
    fail(path, error, rank);
}

Ring* open_ring(const std::string& directory, int rank) {
    if (const ddprun::Status made = ddprun::make_directories(directory); !made)
        fail(directory, made.error().sys, rank);
    const std::string host = ddprun::host_name();
    const auto wall_ns = static_cast<std::int64_t>(ddprun::wall_clock() * 1e9) - now_ns();
    std::byte* const memory = make_file(fmt::format("{}/rank{}-{}-{}-{:x}{}", directory, rank, host,
                                                    ::getpid(), wall_ns + now_ns(), ddprun::kTraceSuffix),
                                        rank);
    auto* const header = new (memory) TraceHeader{};
    header->records = ddprun::kTraceRecords;
    header->wall_ns = wall_ns;
    header->pid = static_cast<std::uint32_t>(::getpid());
    copy_text(header->host, host);
    copy_text(header->clock, ddprun::boot_id());
    header->magic.store(ddprun::kTraceMagic, std::memory_order_release);
    static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { ring.store(nullptr, std::memory_order_relaxed); });
    (void)registered;  // without it a forked child writes its spans among those of its parent
    return new Ring{header, reinterpret_cast<TraceRecord*>(memory + ddprun::kTraceRecordsOffset), 0, 0, 0, 0};
}

/// A number that the ranks of one generation share, and other jobs hardly.
std::uint64_t world_of(const ddprun::WorkerEnv& env) {
    return std::hash<std::string>()(
        fmt::format("{}\n{}\n{}\n{}", env.run_id, env.master_addr, env.master_port, env.generation));
}

std::uint32_t own_thread() {
    thread_local const auto number = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    return number;
}

struct Facts {
    TraceKind kind;
    std::string_view name = {};
    std::uint64_t seq = 0, bytes = 0;
    std::uint8_t operation = 0;
    std::uint16_t group = 0;
};

Begun add(const Facts& facts, std::int64_t begin_ns, std::int64_t end_ns = 0) noexcept {
    Ring* const to = ring.load(std::memory_order_acquire);
    if (to == nullptr) return {};
    const std::uint64_t index = to->header->begun.fetch_add(1, std::memory_order_relaxed);
    TraceRecord& record = to->records[index % ddprun::kTraceRecords];
    record.number.exchange(0, std::memory_order_acq_rel);  // before the stores below
    record.begin_ns = begin_ns;
    record.end_ns.store(end_ns, std::memory_order_relaxed);
    record.waiting_ns.store(0, std::memory_order_relaxed);
    record.seq = facts.seq;
    record.bytes = facts.bytes;
    record.world = to->world.load(std::memory_order_relaxed);
    record.rank = to->rank.load(std::memory_order_relaxed);
    record.generation = to->generation.load(std::memory_order_relaxed);
    record.thread = own_thread();
    record.group = facts.group;
    record.kind = facts.kind;
    record.operation = facts.operation;
    copy_text(record.name, facts.name);
    record.number.store(index + 1, std::memory_order_release);
    return {&record, index + 1};
}

}  // namespace

void enter(const ddprun::WorkerEnv& env) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const char* const directory = std::getenv("DDP_TRACE");
    if (directory == nullptr || *directory == '\0') return;
    if (!is_on()) ring.store(open_ring(directory, env.rank), std::memory_order_release);
    Ring& to = *ring.load();
    const std::uint64_t world = world_of(env);
    if (to.world.exchange(world) != world) to.group = 0;
    ++to.group;
    to.rank = static_cast<std::uint32_t>(env.rank);
    to.generation = static_cast<std::uint32_t>(env.generation);
}

std::uint16_t current_group() {
    const Ring* const to = ring.load(std::memory_order_relaxed);
    return to == nullptr ? std::uint16_t{0} : to->group.load();
}

Begun begin_span(std::string_view name) noexcept {
    return add({.kind = TraceKind::Span, .name = name}, now_ns());
}

Begun begin_collective(const Call& call, std::uint16_t group, std::int64_t begin_ns) noexcept {
    return add({.kind = TraceKind::Collective,
                .seq = call.seq,
                .bytes = call.bytes,
                .operation = static_cast<std::uint8_t>(call.operation),
                .group = group},
               begin_ns);
}

void end_at(const Begun& begun, std::int64_t end_ns, std::int64_t waiting_ns) noexcept {
    if (!is_on() || begun.record == nullptr) return;
    if (begun.record->number.load(std::memory_order_relaxed) != begun.number) return;
    begun.record->waiting_ns.store(waiting_ns, std::memory_order_relaxed);
    begun.record->end_ns.store(end_ns, std::memory_order_relaxed);
}

void end(const Begun& begun) noexcept {
    if (begun.record != nullptr) end_at(begun, now_ns());
}

void add_step(std::uint64_t number, std::int64_t begin_ns, std::int64_t end_ns) noexcept {
    add({.kind = TraceKind::Step, .name = "step", .seq = number}, begin_ns, end_ns);
}

Begun Scope::begin(TraceKind kind, std::string_view name) noexcept {
    return add({.kind = kind, .name = name}, now_ns());
}

}  // namespace ddp::trace
