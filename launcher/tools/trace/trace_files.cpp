#include "launcher/tools/trace/trace.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <map>

#include "env/io/file.h"
#include "env/segment.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostEventBytes = 256 * 1024 * 1024;

class Mapped {
  public:
    explicit Mapped(const UniqueFd& fd) {
        struct stat status {};
        if (::fstat(fd.get(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) < kTraceBytes)
            return;
        void* const memory = ::mmap(nullptr, kTraceBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
        if (memory != MAP_FAILED) memory_ = static_cast<const std::byte*>(memory);
    }
    ~Mapped() {
        if (memory_ != nullptr) ::munmap(const_cast<std::byte*>(memory_), kTraceBytes);
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    /// null unless this is a trace file of this release.
    [[nodiscard]] const TraceHeader* header() const {
        const auto* const header = reinterpret_cast<const TraceHeader*>(memory_);
        if (header == nullptr || header->magic.load(std::memory_order_acquire) != kTraceMagic) return nullptr;
        return header->records == kTraceRecords ? header : nullptr;
    }
    [[nodiscard]] const TraceRecord& record(std::uint64_t index) const {
        return reinterpret_cast<const TraceRecord*>(memory_ + kTraceRecordsOffset)[index % kTraceRecords];
    }

  private:
    const std::byte* memory_ = nullptr;
};

template <std::size_t kSize>
std::string text_in(const char (&text)[kSize]) {
    return std::string(text, ::strnlen(text, kSize));
}

/// The record of that number, unless it is being written or was overwritten.
bool take(const TraceRecord& record, std::uint64_t number, TraceSpan& span) {
    if (record.number.load(std::memory_order_acquire) != number) return false;
    span = {.kind = record.kind,
            .begin_ns = record.begin_ns,
            .end_ns = record.end_ns.load(std::memory_order_relaxed),
            .waiting_ns = record.waiting_ns.load(std::memory_order_relaxed),
            .seq = record.seq,
            .bytes = record.bytes,
            .world = record.world,
            .rank = record.rank,
            .generation = record.generation,
            .thread = record.thread,
            .group = record.group,
            .name = record.kind == TraceKind::Collective
                        ? segment_op_name(static_cast<SegmentOp>(record.operation))
                        : text_in(record.name)};
    std::atomic_thread_fence(std::memory_order_acquire);
    return record.number.load(std::memory_order_relaxed) == number;
}

Result<TracedProcess> read_process(const std::string& path) {
    const Result<UniqueFd> fd = open_regular_file(path);
    if (!fd) return fd.error();
    const Mapped file(*fd);
    const TraceHeader* const header = file.header();
    if (header == nullptr) return Error::invalid(path + ": is no trace file of this release");
    const std::uint64_t begun = header->begun.load(std::memory_order_acquire);
    TracedProcess process{.host = text_in(header->host),
                          .pid = header->pid,
                          .clock = {text_in(header->clock), header->wall_ns},
                          .lost = begun > kTraceRecords ? begun - kTraceRecords : 0,
                          .spans = {}};
    TraceSpan span;
    for (std::uint64_t index = process.lost; index < begun; ++index) {
        if (take(file.record(index), index + 1, span)) process.spans.push_back(span);
    }
    return process;
}

Result<TracedLauncher> read_launcher(const std::string& path) {
    const Result<std::string> text = read_regular_file(path, kMostEventBytes);
    if (!text) return text.error();
    TracedLauncher launcher;
    for (const std::string_view one : split(*text, '\n')) {
        Result<Json> line = parse_json_object(one);
        if (!line) continue;  // the last line may be incomplete
        TracedEvent event;
        ddprun::take(*line, "monotonic_ns", event.at_ns);
        ddprun::take(*line, "clock", event.clock.id);
        ddprun::take(*line, "clock_zero_ns", event.clock.wall_ns);
        ddprun::take(*line, "host", launcher.host);
        for (const char* name : {"monotonic_ns", "clock", "clock_zero_ns"}) line->erase(name);
        event.line = *std::move(line);
        launcher.events.push_back(std::move(event));
    }
    return launcher;
}

}  // namespace

Result<TraceFiles> read_trace_files(const std::string& directory) {
    struct stat status {};
    if (::stat(directory.c_str(), &status) != 0)  // found no more than in a directory without a trace
        return Error{Errc::NotFound, Error::system(directory).what, 0};
    TraceFiles files;
    for (const std::string& name : names_in(directory)) {
        const std::string path = directory + "/" + name;
        if (name.ends_with(kTraceSuffix)) {
            Result<TracedProcess> process = read_process(path);
            if (process) files.processes.push_back(*std::move(process));
            else files.remarks.push_back(process.error().what + "; left out");
        } else if (name.ends_with(kTraceEventsSuffix)) {
            Result<TracedLauncher> launcher = read_launcher(path);
            if (launcher) files.launchers.push_back(*std::move(launcher));
            else files.remarks.push_back(launcher.error().what + "; left out");
        }
    }
    if (!files.processes.empty() || !files.launchers.empty()) return files;
    return Error{Errc::NotFound,
                 fmt::format("{}: has no trace file: a job writes them with ddprun --trace {}{}", directory,
                             directory, files.remarks.empty() ? "" : " (" + files.remarks.front() + ")"),
                 0};
}

}  // namespace ddprun
