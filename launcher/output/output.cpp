#include "launcher/output/output.h"

#include <fcntl.h>
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "env/text.h"
#include "launcher/output/console.h"
#include "launcher/output/kept_output.h"
#include "launcher/output/lines.h"
#include "launcher/output/log_writer.h"
#include "launcher/output/pipes.h"

namespace ddprun {
namespace {

Streams bit_of(Output::Stream stream) { return stream == Output::Stream::Out ? Streams::Out : Streams::Err; }

std::string loss_line(std::string_view why) {
    return fmt::format("ddprun: output is being lost: {}; the job goes on\n", why);
}

/// A worker's stream, or a relayed one of another ddprun.
struct StreamState : PipeReader::Pipe {
    StreamState(UniqueFd pipe, Streams which) : Pipe(std::move(pipe)), stream(which) {}

    StreamOwner owner;
    Streams stream;
    Outlet* outlet = nullptr;    ///< null: not on the console
    LogWriter::Handle filtered;  ///< shared with other streams
    LogWriter::Handle file;
    bool file_failed = false;  ///< the stream's file could not be opened
    LineAssembler assembler;
    std::string prefix;  ///< fixed, unless the template names the time
    /// Both are set for a relayed stream, whose lines already have their prefixes; else both are empty.
    std::function<void(std::string_view)> on_piece;
    std::function<void()> on_end;

    [[nodiscard]] bool is_relayed() const { return on_end != nullptr; }
    [[nodiscard]] bool is_kept() const { return file != nullptr || filtered != nullptr; }
};

/// Another host's ddprun whose lines arrive in its session.
struct Sender {
    LineAssembler out, err;
    std::uint64_t out_bytes = 0, err_bytes = 0;  ///< shown, not reported by on_shown yet
};

StreamState& state_of(PipeReader::Pipe& pipe) { return static_cast<StreamState&>(pipe); }

}  // namespace

struct Output::Impl final : PipeReader::Owner {
    Impl(os::EventLoop& event_loop, OutputSpec output_spec, OutputRanks output_ranks, int out_fd, int err_fd);
    ~Impl() override;

    // Destinations of a stream.
    [[nodiscard]] StreamRoute route(int local_rank, Streams stream) const;
    [[nodiscard]] Outlet& outlet_of(Stream stream) const { return stream == Stream::Out ? *out : *err; }
    void connect_to_files(StreamState& stream, const StreamRoute& route);
    Status keep(std::unique_ptr<StreamState> stream);
    void choose_prefixes();
    [[nodiscard]] PrefixTemplate prefix_for(const PrefixPlace& place) const;
    [[nodiscard]] int ranks_shown_on(const Outlet& outlet) const;

    // Input.
    bool make_room(PipeReader::Pipe& pipe) override;
    void on_read(PipeReader::Pipe& pipe, std::string_view chunk) override;
    void on_end(PipeReader::Pipe& pipe) override;
    void on_pause_in_reading() override { write_soon(); }
    void on_unreadable(const Error& why) override { note_loss(why.what); }
    template <class Choose>
    void pause(const Choose& is_chosen);
    template <class Choose>
    void resume(const Choose& is_chosen);
    void close(StreamState& stream);

    // Display.
    void show(StreamState& stream, std::string_view block);
    void copy_filtered(StreamState& stream, std::string_view block);
    void write_soon();
    void write_now();
    void arm_timer();
    void on_timer();
    void report_shown();

    // Losses.
    void on_log_news();
    void note_loss(const std::string& why);
    void note_console_loss(Outlet& outlet, Outlet& other);

    os::EventLoop& loop;
    OutputSpec spec;
    OutputRanks world;
    PrefixTemplate filtered_prefix{""};
    int console_out, console_err;  ///< borrowed
    std::unique_ptr<Outlet> out, own_err;
    Outlet* err;  ///< `out` itself when both lead to one place: two queues would tear each other's lines
    LogWriter writer;
    AttemptFiles files;
    RankMemory ranks;
    PipeReader reader;
    std::unordered_map<const PipeReader::Pipe*, std::unique_ptr<StreamState>> streams;
    std::map<std::uint64_t, Sender> senders;
    std::function<void(std::uint64_t, std::uint64_t)> on_shown;
    OutputLoss loss;   ///< bytes of closed streams, and the first cause
    OutputLoss total;  ///< the last result of loss()
    bool write_posted = false;
    os::EventLoop::TimerId timer = 0;
    TimePoint timer_at = kNever;
    std::shared_ptr<bool> alive = std::make_shared<bool>(true);  ///< a posted write may outlive us
};

Output::Impl::Impl(os::EventLoop& event_loop, OutputSpec output_spec, OutputRanks output_ranks, int out_fd,
                   int err_fd)
    : loop(event_loop),
      spec(std::move(output_spec)),
      world(output_ranks),
      console_out(out_fd),
      console_err(err_fd),
      writer(event_loop, [this] { on_log_news(); }),
      files(spec, writer),
      reader(event_loop, *this) {
    out = std::make_unique<Outlet>(loop, console_out, spec.color);
    if (!Console::is_same_place(console_out, console_err))
        own_err = std::make_unique<Outlet>(loop, console_err, spec.color);
    err = own_err ? own_err.get() : out.get();
    for (Outlet* outlet : {out.get(), err}) {
        outlet->console().on_room([this, outlet] {
            resume([outlet](const StreamState& stream) { return stream.outlet == outlet; });
            report_shown();
        });
    }
    choose_prefixes();
}

Output::Impl::~Impl() {
    *alive = false;
    for (const auto& [pipe, stream] : streams) reader.remove(*stream);
    loop.cancel(timer);
}

// ---- destinations of a stream

StreamRoute Output::Impl::route(int local_rank, Streams stream) const {
    return route_of(spec, local_rank, stream, !files.directory().empty());
}

void Output::Impl::connect_to_files(StreamState& stream, const StreamRoute& route) {
    const auto take = [this](Result<LogWriter::Handle> opened) {
        if (!opened) note_loss(opened.error().what);
        return opened ? *std::move(opened) : nullptr;
    };
    stream.filtered = take(files.filtered(stream.stream));
    if (const Status made = files.make_rank_directory(stream.owner); !made) note_loss(made.error().what);
    if (!route.to_file) return;
    stream.file = take(files.open(stream.owner, stream.stream));
    stream.file_failed = stream.file == nullptr;
}

Status Output::Impl::keep(std::unique_ptr<StreamState> stream) {
    if (Status added = reader.add(*stream); !added) return added;
    const PipeReader::Pipe* const pipe = stream.get();
    streams.emplace(pipe, std::move(stream));
    return {};
}

/// Each attempt chooses anew, because streams whose files cannot be made go to the console.
void Output::Impl::choose_prefixes() {
    for (Outlet* outlet : {out.get(), err}) {
        const bool is_alone = world.is_whole_job && world.here == 1;
        outlet->set_prefix(prefix_for({ranks_shown_on(*outlet), outlet->console().is_terminal(), is_alone}));
    }
    filtered_prefix = prefix_for({world.here, false, world.is_whole_job});
}

PrefixTemplate Output::Impl::prefix_for(const PrefixPlace& place) const {
    return PrefixTemplate(spec.prefix ? std::string_view(*spec.prefix) : default_prefix(place));
}

int Output::Impl::ranks_shown_on(const Outlet& outlet) const {
    int shown = 0;
    for (int local_rank = 0; local_rank < world.here; ++local_rank) {
        const bool by_out = &outlet == out.get() && route(local_rank, Streams::Out).to_console;
        const bool by_err = &outlet == err && route(local_rank, Streams::Err).to_console;
        if (by_out || by_err) ++shown;
    }
    return world.is_merged ? shown + 1 : shown;
}

// ---- input

/// False when the console or the disk is slower than the workers: the workers wait.
bool Output::Impl::make_room(PipeReader::Pipe& pipe) {
    const StreamState& stream = state_of(pipe);
    if (stream.is_kept() && writer.is_full()) {
        writer.kick();
        pause([](const StreamState& other) { return other.is_kept(); });
        return false;
    }
    if (stream.outlet == nullptr || !stream.outlet->console().is_full()) return true;
    write_now();
    if (!stream.outlet->console().is_full()) return true;
    pause([outlet = stream.outlet](const StreamState& other) { return other.outlet == outlet; });
    return false;
}

template <class Choose>
void Output::Impl::pause(const Choose& is_chosen) {
    for (const auto& [pipe, stream] : streams) {
        if (is_chosen(*stream)) reader.pause(*stream);
    }
}

// A stream that must also wait for the other reason is paused again at its next line.
template <class Choose>
void Output::Impl::resume(const Choose& is_chosen) {
    for (const auto& [pipe, stream] : streams) {
        if (is_chosen(*stream)) reader.resume(*stream);
    }
}

void Output::Impl::on_read(PipeReader::Pipe& pipe, std::string_view chunk) {
    StreamState& stream = state_of(pipe);
    const TimePoint now = loop.now();
    if (stream.is_relayed()) {
        stream.on_piece(chunk);
        return stream.assembler.feed(chunk, now, [&](std::string_view block) { stream.outlet->show(block); });
    }
    ranks.on_output(stream.owner.rank, stream.stream, chunk, now);
    if (stream.file) writer.write(stream.file, chunk);
    if (stream.file_failed) loss.bytes += chunk.size();
    if (stream.outlet == nullptr && stream.filtered == nullptr) return;
    stream.assembler.feed(chunk, now, [&](std::string_view block) { show(stream, block); });
    if (stream.outlet != nullptr && stream.assembler.due(spec.half_line_after) < timer_at) arm_timer();
}

void Output::Impl::on_end(PipeReader::Pipe& pipe) {
    const auto ended = streams.extract(&pipe);
    StreamState& stream = *ended.mapped();
    close(stream);
    write_soon();
    if (stream.on_end) stream.on_end();
}

void Output::Impl::close(StreamState& stream) {
    reader.remove(stream);
    const std::string rest = stream.assembler.finish();
    if (!rest.empty() && stream.is_relayed()) stream.outlet->show(rest);
    else if (!rest.empty()) show(stream, rest);
    if (stream.file) writer.close(std::exchange(stream.file, nullptr));
    stream.filtered = nullptr;
}

// ---- display

void Output::Impl::show(StreamState& stream, std::string_view block) {
    if (stream.filtered != nullptr) copy_filtered(stream, block);
    if (stream.outlet == nullptr) return;
    Outlet& outlet = *stream.outlet;
    if (outlet.has_changing_prefix()) stream.prefix = outlet.prefix_of(stream.owner);
    outlet.show(stream.prefix, block);
}

void Output::Impl::copy_filtered(StreamState& stream, std::string_view block) {
    const std::vector<std::string>& filters = filters_of(spec, stream.stream);
    for_each_line(block, [&](std::string_view line) {
        const bool wanted = std::any_of(filters.begin(), filters.end(), [&](const std::string& text) {
            return line.find(text) != std::string_view::npos;
        });
        if (wanted)
            writer.write(stream.filtered, render_prefix(filtered_prefix, stream.owner) + std::string(line));
    });
}

/// Writes once for all events of this batch.
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
    out->console().write();
    if (own_err) own_err->console().write();
    note_console_loss(*out, *err);
    if (own_err) note_console_loss(*own_err, *out);
    report_shown();
}

void Output::Impl::report_shown() {
    for (auto& [id, sender] : senders) {
        std::uint64_t bytes = 0;
        if (!out->console().is_full()) bytes += std::exchange(sender.out_bytes, 0);
        if (!err->console().is_full()) bytes += std::exchange(sender.err_bytes, 0);
        if (bytes > 0 && on_shown) on_shown(id, bytes);
    }
}

void Output::Impl::arm_timer() {
    TimePoint next = kNever;
    for (const auto& [pipe, stream] : streams) {
        if (stream->outlet != nullptr && !stream->is_relayed())
            next = std::min(next, stream->assembler.due(spec.half_line_after));
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
        if (stream->outlet == nullptr || stream->is_relayed() ||
            stream->assembler.due(spec.half_line_after) > loop.now())
            continue;
        // While nobody reads the console, the rest of the line waits in the pipe.
        if (stream->has_unread()) stream->assembler.restart_age(loop.now());
        else show(*stream, stream->assembler.cut());
    }
    write_now();
    arm_timer();
}

// ---- losses

void Output::Impl::on_log_news() {
    if (const std::string why = writer.loss(); !why.empty()) note_loss(why);
    if (!writer.is_full()) resume([](const StreamState& stream) { return stream.is_kept(); });
}

/// Shows the first loss, once.
void Output::Impl::note_loss(const std::string& why) {
    if (!loss.why.empty()) return;
    loss.why = why;
    err->show(loss_line(printable(why)));
    write_soon();
}

/// Shows the loss on the other console, if there is one that is still read.
void Output::Impl::note_console_loss(Outlet& outlet, Outlet& other) {
    const std::string why = outlet.take_new_loss();
    if (why.empty()) return;
    if (loss.why.empty()) loss.why = why;
    if (&other == &outlet) return;
    other.show(loss_line(why));
    other.console().write();
}

// ---- the interface

Output::Output(os::EventLoop& loop, OutputSpec spec, OutputRanks ranks, int console_out, int console_err)
    : impl_(std::make_unique<Impl>(loop, std::move(spec), ranks, console_out, console_err)) {}

Output::~Output() = default;

void Output::begin_attempt(int attempt) {
    Impl& impl = *impl_;
    finish_attempt();
    impl.ranks.clear();
    if (const Status begun = impl.files.begin(attempt); !begun) impl.note_loss(begun.error().what);
    impl.choose_prefixes();
}

bool Output::needs_pipe(const StreamOwner& owner, Stream stream) const {
    return impl_->route(owner.local_rank, bit_of(stream)).needs_pipe;
}

Result<UniqueFd> Output::direct_file(const StreamOwner& owner, Stream stream) {
    Impl& impl = *impl_;
    impl.ranks.begin(owner.rank, impl.loop.now());
    if (const Status made = impl.files.make_rank_directory(owner); !made) return made.error();
    const bool kept = impl.route(owner.local_rank, bit_of(stream)).to_file;
    const std::string path = kept ? impl.files.path_of(owner, bit_of(stream)) : "/dev/null";
    UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!file) return Error::system("open " + path);
    if (kept) impl.ranks.add_direct_file(owner.rank, bit_of(stream), path);
    return file;
}

Status Output::add(UniqueFd pipe, const StreamOwner& owner, Stream stream) {
    Impl& impl = *impl_;
    auto state = std::make_unique<StreamState>(std::move(pipe), bit_of(stream));
    state->owner = owner;
    const StreamRoute route = impl.route(owner.local_rank, state->stream);
    if (route.to_console) {
        state->outlet = &impl.outlet_of(stream);
        state->prefix = state->outlet->prefix_of(owner);
    }
    impl.connect_to_files(*state, route);
    if (Status kept = impl.keep(std::move(state)); !kept) return kept;
    impl.ranks.begin(owner.rank, impl.loop.now());
    return {};
}

Status Output::relay(UniqueFd pipe, Stream stream, std::function<void(std::string_view)> on_piece,
                     std::function<void()> on_end) {
    auto state = std::make_unique<StreamState>(std::move(pipe), bit_of(stream));
    state->outlet = &impl_->outlet_of(stream);
    state->on_piece = std::move(on_piece);
    state->on_end = std::move(on_end);
    return impl_->keep(std::move(state));
}

void Output::show_sent(std::uint64_t sender, Stream stream, std::string_view piece) {
    Sender& from = impl_->senders[sender];
    LineAssembler& lines = stream == Stream::Out ? from.out : from.err;
    lines.feed(piece, impl_->loop.now(),
               [&](std::string_view block) { impl_->outlet_of(stream).show(block); });
    (stream == Stream::Out ? from.out_bytes : from.err_bytes) += piece.size();
    impl_->write_soon();
}

void Output::end_sent(std::uint64_t sender) {
    auto ended = impl_->senders.extract(sender);
    if (ended.empty()) return;
    impl_->out->show(ended.mapped().out.finish());
    impl_->err->show(ended.mapped().err.finish());
    impl_->write_soon();
}

void Output::on_shown(std::function<void(std::uint64_t, std::uint64_t)> handler) {
    impl_->on_shown = std::move(handler);
}

void Output::read_rest_of(int rank) {
    for (const auto& [pipe, stream] : impl_->streams) {
        if (!stream->is_relayed() && stream->owner.rank == rank) impl_->reader.read_rest(*stream);
    }
    impl_->write_soon();
}

void Output::finish_attempt() {
    Impl& impl = *impl_;
    std::erase_if(impl.streams, [&](const auto& one) {
        if (one.second->is_relayed()) return false;
        impl.reader.read_rest(*one.second);
        impl.close(*one.second);
        return true;
    });
    impl.arm_timer();
    impl.write_now();
}

void Output::check_disk() {
    if (!impl_->ranks.has_direct_files()) return;
    const Status room = check_room(impl_->files.directory());
    if (!room) impl_->note_loss(room.error().what);
}

bool Output::say(std::string_view lines, Stream where) {
    const bool queued = impl_->outlet_of(where).say(lines);
    impl_->write_now();
    return queued;
}

void Output::say_last(std::string_view lines) {
    impl_->err->show(lines);
    impl_->write_now();
}

std::optional<Output::Stream> Output::console_at(int fd) const {
    if (Console::is_same_place(fd, impl_->console_err)) return Stream::Err;
    if (Console::is_same_place(fd, impl_->console_out)) return Stream::Out;
    return std::nullopt;
}

bool Output::files_are_written() const { return impl_->writer.is_written(); }

bool Output::consoles_are_written() const {
    return impl_->out->console().pending() == 0 && impl_->err->console().pending() == 0;
}

bool Output::flushed() const { return consoles_are_written() && files_are_written(); }

void Output::flush(TimePoint deadline) {
    impl_->write_now();
    impl_->writer.flush(deadline);
    if (const std::string why = impl_->writer.loss(); !why.empty()) impl_->note_loss(why);
    impl_->out->console().flush(deadline);
    impl_->err->console().flush(deadline);
}

std::vector<std::string> Output::last_stderr(int rank) const { return impl_->ranks.last_stderr(rank); }

TimePoint Output::last_output(int rank) const { return impl_->ranks.last_output(rank); }

const OutputLoss& Output::loss() const {
    // impl.loss counts closed streams; add the losses of consoles and open files so far.
    Impl& impl = *impl_;
    impl.total = impl.loss;
    impl.total.bytes += impl.out->console().lost_bytes() + impl.writer.lost_bytes();
    if (impl.own_err) impl.total.bytes += impl.own_err->console().lost_bytes();
    return impl.total;
}

std::string Output::attempt_directory() const { return impl_->files.directory(); }

}  // namespace ddprun
