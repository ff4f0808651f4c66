#include "launcher/output/output.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>

#include <fmt/core.h>

#include "env/io/file.h"
#include "env/text.h"
#include "launcher/output/console.h"
#include "launcher/output/lines.h"
#include "launcher/output/log_files.h"
#include "launcher/output/log_writer.h"
#include "launcher/output/stream_route.h"

namespace ddprun {
namespace {

constexpr std::size_t kReadBytes = 256 * 1024;
/// More than any pipe holds: what is read at once of a stream whose writer never stops.
constexpr std::size_t kMostRestBytes = 2 << 20;
/// Memory for the report, per rank.
constexpr std::size_t kTailBytes = 16 * 1024;
constexpr std::size_t kReportLines = 20;
/// How long the pipe of a busy worker fills before it is read again. Nobody sees two milliseconds, and a worker
/// that writes a line every microsecond would otherwise wake us for each.
constexpr Duration kRest = std::chrono::milliseconds(2);
/// What may wait of our own lines: the workers wait for the console, but nobody can make us wait.
constexpr std::size_t kMaxOwn = 1 << 20;
/// How long a line waits for the same line of other ranks with --fold.
constexpr Duration kFoldWindow = std::chrono::milliseconds(100);

Streams bit_of(Output::Stream stream) { return stream == Output::Stream::Out ? Streams::Out : Streams::Err; }
const char* file_name(Output::Stream stream) { return stream == Output::Stream::Out ? "stdout.log" : "stderr.log"; }

template <class Visit>
void for_each_line(std::string_view block, const Visit& visit) {
    while (!block.empty()) {
        const std::size_t end = block.find('\n') + 1;
        visit(block.substr(0, end));
        block.remove_prefix(end);
    }
}

void append_prefixed(std::string& queue, std::string_view prefix, std::string_view block) {
    for_each_line(block, [&](std::string_view line) {
        queue.append(prefix);
        queue.append(line);
    });
}

/// Wall-clock time of day, as people compare it with other logs: "14:03:59.123".
std::string time_of_day() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    tm local{};
    ::localtime_r(&now.tv_sec, &local);
    return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec, now.tv_nsec / 1'000'000);
}

/// One console with what stands before it.
struct Outlet {
    /// Puts lines of our own behind what waits; false: too many of them do already.
    bool append_own(std::string_view lines) {
        for (; !own.empty() && own.front().first <= console.gone(); own.pop_front()) own_bytes -= own.front().second;
        if (own_bytes + lines.size() > kMaxOwn) return false;
        console.queue().append(lines);
        own_bytes += lines.size();
        own.emplace_back(console.gone() + console.pending(), lines.size());
        return true;
    }

    Outlet(os::EventLoop& loop, int fd) : console(loop, fd), folder(kFoldWindow) {}
    Console console;
    LineFolder folder;
    PrefixTemplate prefix{""};
    bool colored = false;
    /// Our own lines that wait: where in the stream of all bytes they end, and their size.
    std::deque<std::pair<std::uint64_t, std::size_t>> own;
    std::size_t own_bytes = 0;
    std::string stuck;  ///< the loss that has been said
};

struct StreamState {
    UniqueFd pipe;
    StreamOwner owner;
    Output::Stream stream;
    Outlet* outlet = nullptr;  ///< null: not on the console
    LogWriter::Handle filtered;  ///< shared with other streams
    LogWriter::Handle file;
    bool file_failed = false;  ///< it should have one, which could not be opened
    LineAssembler assembler;
    std::string prefix;        ///< fixed, unless the template names the time
    std::size_t capacity = 0;  ///< of the pipe
    TimePoint last_read{};
    bool watched = false;      ///< the loop tells when there is something to read
    bool resting = false;      ///< read by the clock instead
    bool paused = false;       ///< not read at all: the console is full, or the disk is slow
    /// Of another ddprun, which has put its prefixes: nobody's here. Both or none.
    std::function<void(std::string_view)> on_piece;
    std::function<void()> on_end;
    [[nodiscard]] bool is_relayed() const { return on_end != nullptr; }

    [[nodiscard]] bool is_kept() const { return file != nullptr || filtered != nullptr; }
};

/// What is remembered of a rank.
struct RankState {
    std::string tail;          ///< the end of its stderr
    bool tail_is_cut = false;
    TimePoint last_output{};
    std::string stderr_path;   ///< when stderr goes straight to a file
    std::vector<std::string> direct_files;
};

void remember(RankState& rank, std::string_view chunk) {
    if (chunk.size() >= kTailBytes) {
        rank.tail_is_cut = true;
        rank.tail = chunk.substr(chunk.size() - kTailBytes);
        return;
    }
    rank.tail += chunk;
    if (rank.tail.size() <= 2 * kTailBytes) return;
    rank.tail_is_cut = true;
    rank.tail.erase(0, rank.tail.size() - kTailBytes);
}

}  // namespace

struct Output::Impl {
    Impl(os::EventLoop& event_loop, OutputSpec output_spec, OutputRanks output_ranks, int out_fd, int err_fd);
    ~Impl();

    // The worker's side.
    Status open_attempt();
    Status make_rank_directory(const StreamOwner& owner) const;
    [[nodiscard]] std::string path_of(const StreamOwner& owner, Stream stream) const;
    [[nodiscard]] StreamRoute route(int local_rank, Stream stream) const;
    [[nodiscard]] LogWriter::Handle filter_file(Stream stream);
    Result<LogWriter::Handle> open_file(const std::string& path);
    void close_files();
    Status watch(StreamState& stream);
    void unwatch(StreamState& stream);
    void on_readable(int pipe);
    bool make_room(StreamState& stream);
    void end(int pipe);
    void rest(StreamState& stream);
    void read_resting();
    ssize_t read_once(StreamState& stream);
    void read_all(StreamState& stream);
    void take(StreamState& stream, std::string_view chunk);
    void close(StreamState& stream);

    // The console's side.
    void show(StreamState& stream, std::string_view block);
    void show_folded(Outlet& outlet, const std::vector<FoldedLine>& lines);
    void copy_filtered(StreamState& stream, std::string_view block);
    void choose_prefixes();
    [[nodiscard]] PrefixTemplate prefix_for(const PrefixPlace& place) const;
    [[nodiscard]] int ranks_shown_on(const Outlet& outlet) const;
    [[nodiscard]] static std::string prefix_of(const StreamOwner& owner, const PrefixTemplate& prefix);
    [[nodiscard]] static std::string prefix_of(const StreamOwner& owner, const Outlet& outlet);
    void write_soon();
    void write_now();
    template <class Choose>
    void pause(const Choose& is_chosen);
    template <class Choose>
    void resume(const Choose& is_chosen);
    void on_log_news();
    void arm_timer();
    void on_timer();
    void note_loss(const std::string& why);
    void note_console_loss(Outlet& outlet, Outlet& other);

    os::EventLoop& loop;
    OutputSpec spec;
    OutputRanks world;
    PrefixTemplate filtered_prefix{""};
    int console_out, console_err;  ///< as they were given; borrowed
    std::unique_ptr<Outlet> out, own_err;
    Outlet* err;  ///< `out` itself when both lead to one place: two queues would tear each other's lines
    std::unordered_map<int, std::unique_ptr<StreamState>> streams;
    std::map<int, RankState> ranks;
    std::map<int, StreamOwner> owners;
    LogWriter writer;
    LogWriter::Handle filtered_out, filtered_err;
    std::string attempt_directory;
    Status attempt_status;
    std::vector<int> resting;  ///< while it is not empty, a timer runs
    OutputLoss loss;   ///< of streams that are closed, and the first cause
    OutputLoss total;  ///< what loss() handed out last
    std::string buffer;
    bool write_posted = false;
    os::EventLoop::TimerId timer = 0;
    TimePoint timer_at = kNever;
    std::shared_ptr<bool> alive = std::make_shared<bool>(true);  ///< a posted write may outlive us
};

Output::Impl::Impl(os::EventLoop& event_loop, OutputSpec output_spec, OutputRanks output_ranks, int out_fd, int err_fd)
    : loop(event_loop), spec(std::move(output_spec)), world(output_ranks), console_out(out_fd), console_err(err_fd),
      writer(event_loop, [this] { on_log_news(); }), buffer(kReadBytes, '\0') {
    out = std::make_unique<Outlet>(loop, console_out);
    if (!Console::is_same_place(console_out, console_err)) own_err = std::make_unique<Outlet>(loop, console_err);
    err = own_err ? own_err.get() : out.get();
    using Color = OutputSpec::Color;
    for (Outlet* outlet : {out.get(), err}) {
        outlet->colored = spec.color == Color::Always || (spec.color == Color::Auto && outlet->console.is_terminal());
        outlet->console.on_room([this, outlet] { resume([outlet](const StreamState& stream) { return stream.outlet == outlet; }); });
    }
    choose_prefixes();
}

Output::Impl::~Impl() {
    *alive = false;
    for (const auto& [pipe, stream] : streams) unwatch(*stream);
    loop.cancel(timer);
}

// ---- where a stream goes

StreamRoute Output::Impl::route(int local_rank, Stream stream) const {
    return route_of(spec, local_rank, bit_of(stream), !attempt_directory.empty());
}

std::string Output::Impl::path_of(const StreamOwner& owner, Stream stream) const {
    return fmt::format("{}/{}/{}", attempt_directory, owner.rank, file_name(stream));
}

Status Output::Impl::make_rank_directory(const StreamOwner& owner) const {
    if (attempt_directory.empty()) return {};
    return make_directories(fmt::format("{}/{}", attempt_directory, owner.rank));
}

Result<LogWriter::Handle> Output::Impl::open_file(const std::string& path) {
    Result<LogFile> opened = LogFile::open(path, spec.max_file_bytes);
    if (!opened) return opened.error();
    return writer.add(*std::move(opened));
}

LogWriter::Handle Output::Impl::filter_file(Stream stream) {
    const bool is_out = stream == Stream::Out;
    if ((is_out ? spec.stdout_filters : spec.stderr_filters).empty() || attempt_directory.empty()) return nullptr;
    LogWriter::Handle& file = is_out ? filtered_out : filtered_err;
    if (file) return file;
    Result<LogWriter::Handle> opened = open_file(fmt::format("{}/filtered_{}", attempt_directory, file_name(stream)));
    if (opened) file = *std::move(opened);
    else note_loss(opened.error().what);
    return file;
}

void Output::Impl::close_files() {
    for (LogWriter::Handle* file : {&filtered_out, &filtered_err}) {
        if (*file) writer.close(std::exchange(*file, nullptr));
    }
}

// ---- reading

Status Output::Impl::watch(StreamState& stream) {
    const int pipe = stream.pipe.get();
    Status watched = loop.watch(pipe, EPOLLIN, [this, pipe](std::uint32_t) { on_readable(pipe); });
    stream.watched = watched.has_value();
    return watched;
}

void Output::Impl::unwatch(StreamState& stream) {
    if (std::exchange(stream.watched, false)) loop.unwatch(stream.pipe.get());
}

void Output::Impl::on_readable(int pipe) {
    const auto found = streams.find(pipe);
    if (found == streams.end() || !make_room(*found->second)) return;
    StreamState& stream = *found->second;
    const ssize_t n = read_once(stream);
    if (n == 0) return end(pipe);
    if (n < 0) return;
    const TimePoint before = std::exchange(stream.last_read, loop.now());
    if (loop.now() - before < kRest && static_cast<std::size_t>(n) < stream.capacity / 2) rest(stream);
    write_soon();
}

/// False when the console, or the disk, is slower than the workers: they wait.
bool Output::Impl::make_room(StreamState& stream) {
    if (stream.is_kept() && writer.is_full()) {
        writer.kick();
        pause([](const StreamState& other) { return other.is_kept(); });
        return false;
    }
    if (stream.outlet == nullptr || !stream.outlet->console.is_full()) return true;
    write_now();
    if (!stream.outlet->console.is_full()) return true;
    pause([outlet = stream.outlet](const StreamState& other) { return other.outlet == outlet; });
    return false;
}

void Output::Impl::end(int pipe) {
    const auto found = streams.find(pipe);
    close(*found->second);
    const std::function<void()> on_end = std::move(found->second->on_end);
    streams.erase(found);
    write_soon();
    if (on_end) on_end();
}

// As network drivers do under load: events tell of the first lines at once; while more keep coming, the pipes are
// looked at by the clock. Every write of a worker into a watched pipe costs it and us a wake-up.
void Output::Impl::rest(StreamState& stream) {
    stream.resting = true;
    unwatch(stream);
    resting.push_back(stream.pipe.get());
    if (resting.size() == 1) loop.call_at(deadline_after(loop.now(), kRest), [this, still = alive] {
        if (*still) read_resting();
    });
}

void Output::Impl::read_resting() {
    bool any_full = false;
    for (const int pipe : std::exchange(resting, {})) {
        const auto found = streams.find(pipe);
        if (found == streams.end() || !found->second->resting || !make_room(*found->second)) continue;
        StreamState& stream = *found->second;
        const ssize_t n = read_once(stream);
        if (n == 0) {
            end(pipe);
        } else if (n < 0) {
            stream.resting = false;
            if (const Status watched = watch(stream); !watched) note_loss(watched.error().what);
        } else {
            any_full = any_full || static_cast<std::size_t>(n) >= stream.capacity / 2;
            stream.last_read = loop.now();
            resting.push_back(pipe);
        }
    }
    write_now();
    if (resting.empty()) return;
    // A pipe that has filled up in this time makes its worker wait: come back at once.
    loop.call_at(any_full ? loop.now() : deadline_after(loop.now(), kRest), [this, still = alive] {
        if (*still) read_resting();
    });
}

/// As read(2): bytes taken, 0 at the end of the stream, -1 when nothing is there now.
ssize_t Output::Impl::read_once(StreamState& stream) {
    ssize_t n = 0;
    do {
        n = ::read(stream.pipe.get(), buffer.data(), buffer.size());
    } while (n < 0 && errno == EINTR);
    if (n > 0) take(stream, std::string_view(buffer).substr(0, static_cast<std::size_t>(n)));
    // An error of a pipe is the end of what it can tell.
    return n < 0 && errno != EAGAIN ? 0 : n;
}

void Output::Impl::read_all(StreamState& stream) {
    // Reading is not held up by a full console here: what the pipes hold is all there can be.
    const std::size_t reads = kMostRestBytes / kReadBytes;
    for (std::size_t n = 0; n < reads && read_once(stream) > 0; ++n) {}
}

void Output::Impl::take(StreamState& stream, std::string_view chunk) {
    const TimePoint now = loop.now();
    if (stream.is_relayed()) {
        stream.on_piece(chunk);
        return stream.assembler.feed(chunk, now, [&](std::string_view block) { stream.outlet->console.queue().append(block); });
    }
    RankState& rank = ranks[stream.owner.rank];
    rank.last_output = now;
    if (stream.stream == Stream::Err) remember(rank, chunk);
    if (stream.file) writer.write(stream.file, chunk);
    if (stream.file_failed) loss.bytes += chunk.size();
    if (stream.outlet == nullptr && stream.filtered == nullptr) return;
    stream.assembler.feed(chunk, now, [&](std::string_view block) { show(stream, block); });
    if (stream.outlet != nullptr && stream.assembler.due(spec.half_line_after) < timer_at) arm_timer();
}

void Output::Impl::close(StreamState& stream) {
    unwatch(stream);
    const std::string rest = stream.assembler.finish();
    if (!rest.empty() && stream.is_relayed()) stream.outlet->console.queue().append(rest);
    else if (!rest.empty()) show(stream, rest);
    if (stream.file) writer.close(std::exchange(stream.file, nullptr));
    stream.filtered = nullptr;
}

// ---- showing

/// Again for each attempt: streams whose files cannot be made come to the console.
void Output::Impl::choose_prefixes() {
    for (Outlet* outlet : {out.get(), err}) {
        outlet->prefix = prefix_for({ranks_shown_on(*outlet), outlet->console.is_terminal(), world.is_whole_job && world.here == 1});
    }
    filtered_prefix = prefix_for({world.here, false, world.is_whole_job});
}

PrefixTemplate Output::Impl::prefix_for(const PrefixPlace& place) const {
    return PrefixTemplate(spec.prefix ? std::string_view(*spec.prefix) : default_prefix(place));
}

int Output::Impl::ranks_shown_on(const Outlet& outlet) const {
    int shown = 0;
    for (int local_rank = 0; local_rank < world.here; ++local_rank) {
        const bool by_out = &outlet == out.get() && route(local_rank, Stream::Out).to_console;
        const bool by_err = &outlet == err && route(local_rank, Stream::Err).to_console;
        if (by_out || by_err) ++shown;
    }
    return world.is_merged ? shown + 1 : shown;
}

std::string Output::Impl::prefix_of(const StreamOwner& owner, const PrefixTemplate& prefix) {
    return prefix.render({fmt::format("{}", owner.rank), fmt::format("{}", owner.local_rank), owner.role, owner.host,
                          prefix.names_time() ? time_of_day() : ""});
}

std::string Output::Impl::prefix_of(const StreamOwner& owner, const Outlet& outlet) {
    const std::string prefix = prefix_of(owner, outlet.prefix);
    return outlet.colored && !prefix.empty() ? colored_prefix(prefix, owner.rank) : prefix;
}

void Output::Impl::show(StreamState& stream, std::string_view block) {
    if (stream.filtered != nullptr) copy_filtered(stream, block);
    if (stream.outlet == nullptr) return;
    if (spec.fold) {
        for_each_line(block, [&](std::string_view line) { stream.outlet->folder.offer(stream.owner.rank, line, loop.now()); });
        show_folded(*stream.outlet, stream.outlet->folder.due(loop.now()));
        if (stream.outlet->folder.next_due() < timer_at) arm_timer();
        return;
    }
    if (stream.outlet->prefix.names_time()) stream.prefix = prefix_of(stream.owner, *stream.outlet);
    append_prefixed(stream.outlet->console.queue(), stream.prefix, block);
}

void Output::Impl::show_folded(Outlet& outlet, const std::vector<FoldedLine>& lines) {
    for (const FoldedLine& line : lines) {
        const StreamOwner& first = owners[line.ranks.front()];
        std::string prefix;
        if (line.ranks.size() == 1) {
            prefix = prefix_of(first, outlet);
        } else {
            std::vector<int> local;
            for (const int rank : line.ranks) local.push_back(owners[rank].local_rank);
            std::sort(local.begin(), local.end());
            prefix = outlet.prefix.render({format_ranges(line.ranks), format_ranges(local), first.role, first.host,
                                           outlet.prefix.names_time() ? time_of_day() : ""});
        }
        append_prefixed(outlet.console.queue(), prefix, line.text);
    }
}

void Output::Impl::copy_filtered(StreamState& stream, std::string_view block) {
    const std::vector<std::string>& filters = stream.stream == Stream::Out ? spec.stdout_filters : spec.stderr_filters;
    for_each_line(block, [&](std::string_view line) {
        const bool wanted = std::any_of(filters.begin(), filters.end(),
                                        [&](const std::string& text) { return line.find(text) != std::string_view::npos; });
        if (wanted) writer.write(stream.filtered, prefix_of(stream.owner, filtered_prefix) + std::string(line));
    });
}

/// One write for all that this batch of events brings.
void Output::Impl::write_soon() {
    if (write_posted) return;
    write_posted = true;
    loop.post([this, still = alive] {
        if (*still) write_now();
    });
}

void Output::Impl::write_now() {
    write_posted = false;
    writer.kick();
    out->console.write();
    if (own_err) own_err->console.write();
    note_console_loss(*out, *err);
    if (own_err) note_console_loss(*own_err, *out);
}

/// Says the first loss, once.
void Output::Impl::note_loss(const std::string& why) {
    if (!loss.why.empty()) return;
    loss.why = why;
    err->console.queue() += fmt::format("ddprun: output is being lost: {}; the job goes on\n", printable(why));
    write_soon();
}

/// Says it on the other console, if there is one that is still read.
void Output::Impl::note_console_loss(Outlet& outlet, Outlet& other) {
    if (outlet.console.lost_bytes() == 0 || !outlet.stuck.empty()) return;
    outlet.stuck = outlet.console.loss();
    if (loss.why.empty()) loss.why = outlet.stuck;
    if (&other == &outlet) return;
    other.console.queue() += fmt::format("ddprun: output is being lost: {}; the job goes on\n", outlet.stuck);
    other.console.write();
}

// A paused pipe is not watched at all: a hang-up would be told again and again whatever the events asked for.
template <class Choose>
void Output::Impl::pause(const Choose& is_chosen) {
    for (const auto& [pipe, stream] : streams) {
        if (stream->paused || !is_chosen(*stream)) continue;
        stream->paused = true;
        stream->resting = false;
        unwatch(*stream);
    }
}

// Who waits for the other reason as well is paused again at its next line.
template <class Choose>
void Output::Impl::resume(const Choose& is_chosen) {
    for (const auto& [pipe, stream] : streams) {
        if (!stream->paused || !is_chosen(*stream)) continue;
        stream->paused = false;
        if (const Status watched = watch(*stream); !watched) note_loss(watched.error().what);
    }
}

void Output::Impl::on_log_news() {
    if (const std::string why = writer.loss(); !why.empty()) note_loss(why);
    if (!writer.is_full()) resume([](const StreamState& stream) { return stream.is_kept(); });
}

// ---- time

void Output::Impl::arm_timer() {
    TimePoint next = std::min(out->folder.next_due(), err->folder.next_due());
    for (const auto& [pipe, stream] : streams) {
        if (stream->outlet != nullptr && !stream->is_relayed()) next = std::min(next, stream->assembler.due(spec.half_line_after));
    }
    if (next == timer_at) return;
    loop.cancel(timer);
    timer_at = next;
    timer = next == kNever ? 0 : loop.call_at(next, [this] { on_timer(); });
}

void Output::Impl::on_timer() {
    timer = 0;
    timer_at = kNever;
    for (const auto& [pipe, stream] : streams) {
        if (stream->outlet == nullptr || stream->is_relayed() || stream->assembler.due(spec.half_line_after) > loop.now()) continue;
        show(*stream, stream->assembler.cut());
    }
    show_folded(*out, out->folder.due(loop.now()));
    if (own_err) show_folded(*own_err, own_err->folder.due(loop.now()));
    write_now();
    arm_timer();
}

// ---- the interface

Output::Output(os::EventLoop& loop, OutputSpec spec, OutputRanks ranks, int console_out, int console_err)
    : impl_(std::make_unique<Impl>(loop, std::move(spec), ranks, console_out, console_err)) {}

Output::~Output() = default;

void Output::begin_attempt(int attempt) {
    Impl& impl = *impl_;
    finish_attempt();
    impl.ranks.clear();
    impl.owners.clear();
    impl.close_files();
    impl.attempt_directory.clear();
    if (!impl.spec.log_dir.empty()) {
        const std::string directory = fmt::format("{}/attempt_{}", impl.spec.log_dir, attempt);
        if (const Status made = make_directories(directory); made) impl.attempt_directory = directory;
        else impl.note_loss(made.error().what);
    }
    impl.choose_prefixes();
}

bool Output::needs_pipe(const StreamOwner& owner, Stream stream) const { return impl_->route(owner.local_rank, stream).needs_pipe; }

Result<UniqueFd> Output::direct_file(const StreamOwner& owner, Stream stream) {
    Impl& impl = *impl_;
    impl.ranks[owner.rank].last_output = impl.loop.now();
    if (const Status made = impl.make_rank_directory(owner); !made) return made.error();
    const bool kept = impl.route(owner.local_rank, stream).to_file;
    const std::string path = kept ? impl.path_of(owner, stream) : "/dev/null";
    UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!file) return Error::system("open " + path);
    if (kept) impl.ranks[owner.rank].direct_files.push_back(path);
    if (kept && stream == Stream::Err) impl.ranks[owner.rank].stderr_path = path;
    return file;
}

Status Output::add(UniqueFd pipe, const StreamOwner& owner, Stream stream) {
    Impl& impl = *impl_;
    auto state = std::make_unique<StreamState>();
    const int fd = pipe.get();
    state->pipe = std::move(pipe);
    state->owner = owner;
    state->stream = stream;
    const int capacity = ::fcntl(fd, F_GETPIPE_SZ);
    state->capacity = capacity > 0 ? static_cast<std::size_t>(capacity) : 0;
    const StreamRoute route = impl.route(owner.local_rank, stream);
    if (route.to_console) state->outlet = stream == Stream::Out ? impl.out.get() : impl.err;
    state->filtered = impl.filter_file(stream);
    if (state->outlet != nullptr) state->prefix = Impl::prefix_of(owner, *state->outlet);
    if (const Status made = impl.make_rank_directory(owner); !made) impl.note_loss(made.error().what);
    if (route.to_file) {
        Result<LogWriter::Handle> file = impl.open_file(impl.path_of(owner, stream));
        if (file) state->file = *std::move(file);
        else impl.note_loss(file.error().what);
        state->file_failed = !file;
    }
    if (const Status watched = impl.watch(*state); !watched) return watched;
    impl.streams[fd] = std::move(state);
    impl.ranks[owner.rank].last_output = impl.loop.now();
    impl.owners[owner.rank] = owner;
    impl.out->folder.set_world(impl.owners.size());
    impl.err->folder.set_world(impl.owners.size());
    return {};
}

Status Output::relay(UniqueFd pipe, Stream stream, std::function<void(std::string_view)> on_piece, std::function<void()> on_end) {
    auto state = std::make_unique<StreamState>();
    const int fd = pipe.get();
    state->pipe = std::move(pipe);
    state->stream = stream;
    state->outlet = stream == Stream::Out ? impl_->out.get() : impl_->err;
    state->on_piece = std::move(on_piece);
    state->on_end = std::move(on_end);
    if (const Status watched = impl_->watch(*state); !watched) return watched;
    impl_->streams[fd] = std::move(state);
    return {};
}

void Output::read_rest_of(int rank) {
    for (const auto& [pipe, stream] : impl_->streams) {
        if (!stream->is_relayed() && stream->owner.rank == rank) impl_->read_all(*stream);
    }
    impl_->write_soon();
}

void Output::finish_attempt() {
    Impl& impl = *impl_;
    std::erase_if(impl.streams, [&](const auto& one) {
        if (one.second->is_relayed()) return false;
        impl.read_all(*one.second);
        impl.close(*one.second);
        return true;
    });
    impl.show_folded(*impl.out, impl.out->folder.all());
    if (impl.own_err) impl.show_folded(*impl.own_err, impl.own_err->folder.all());
    impl.arm_timer();
    impl.write_now();
}

bool Output::say(std::string_view lines, Stream where) {
    Outlet& outlet = where == Stream::Out ? *impl_->out : *impl_->err;
    const bool queued = outlet.append_own(lines);
    impl_->write_now();
    return queued;
}

void Output::say_last(std::string_view lines) {
    impl_->err->console.queue().append(lines);
    impl_->write_now();
}

std::optional<Output::Stream> Output::console_at(int fd) const {
    if (Console::is_same_place(fd, impl_->console_err)) return Stream::Err;
    if (Console::is_same_place(fd, impl_->console_out)) return Stream::Out;
    return std::nullopt;
}

bool Output::files_are_written() const { return impl_->writer.is_written(); }

bool Output::flushed() const {
    return impl_->out->console.pending() == 0 && impl_->err->console.pending() == 0 && files_are_written();
}

void Output::flush(TimePoint deadline) {
    impl_->write_now();
    impl_->writer.flush(deadline);
    if (const std::string why = impl_->writer.loss(); !why.empty()) impl_->note_loss(why);
    impl_->out->console.flush(deadline);
    impl_->err->console.flush(deadline);
}

std::vector<std::string> Output::last_stderr(int rank) const {
    const auto found = impl_->ranks.find(rank);
    if (found == impl_->ranks.end()) return {};
    const RankState& state = found->second;
    if (state.stderr_path.empty()) return last_lines(state.tail, kReportLines, state.tail_is_cut);
    const std::string end = read_file_end(state.stderr_path, kTailBytes);
    return last_lines(end, kReportLines, end.size() == kTailBytes);
}

TimePoint Output::last_output(int rank) const {
    const auto found = impl_->ranks.find(rank);
    if (found == impl_->ranks.end()) return {};
    TimePoint latest = found->second.last_output;
    for (const std::string& path : found->second.direct_files) latest = std::max(latest, last_write(path));
    return latest;
}

const OutputLoss& Output::loss() const {
    // What consoles and open files have lost so far is added to the sum of what is closed.
    Impl& impl = *impl_;
    impl.total = impl.loss;
    impl.total.bytes += impl.out->console.lost_bytes() + impl.writer.lost_bytes();
    if (impl.own_err) impl.total.bytes += impl.own_err->console.lost_bytes();
    return impl.total;
}

std::string Output::attempt_directory() const { return impl_->attempt_directory; }

}  // namespace ddprun
