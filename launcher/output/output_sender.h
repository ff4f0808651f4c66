#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/output/output.h"

namespace ddprun {

/// Reads the lines that Output writes and sends them to another ddprun, which shows them
/// (Output::show_sent).
///
/// At most `window` bytes are sent ahead of what the other side has shown. The rest waits in the sockets that
/// Output writes to, then in Output, then in the workers' pipes: workers wait as for any slow console. For
/// the loop's thread.
class OutputSender {
  public:
    struct Parts {
        os::EventLoop& loop;
        std::size_t window;  ///< bytes
        /// False: the session is over, and nothing was sent.
        std::function<bool(Output::Stream stream, std::string bytes)> send;
    };
    /// Sends nothing before begin(). Error: System (no sockets).
    static Result<std::unique_ptr<OutputSender>> create(Parts parts);
    ~OutputSender();
    OutputSender(const OutputSender&) = delete;
    OutputSender& operator=(const OutputSender&) = delete;

    /// The descriptor that Output writes a stream to; lives as long as this object.
    [[nodiscard]] int console(Output::Stream stream) const { return way_of(stream).writing.get(); }
    /// Call it when a session has begun, the first or one after a lost session.
    void begin();
    /// Call it when the other side has shown `bytes` more.
    void shown(std::uint64_t bytes);
    /// True when the other side has shown all that Output has written so far.
    [[nodiscard]] bool is_done() const;
    /// Writes the unsent bytes to these descriptors, at the end of a job whose session was lost. Blocks as
    /// long as they do.
    void write_rest(int out, int err);

  private:
    struct Way {
        UniqueFd reading, writing;
        bool is_watched = false;
        std::string unsent;  ///< bytes that were read and could not be sent
    };
    explicit OutputSender(Parts parts) : parts_(std::move(parts)) {}
    [[nodiscard]] const Way& way_of(Output::Stream stream) const {
        return ways_[stream == Output::Stream::Out ? 0 : 1];
    }
    [[nodiscard]] Way& way_of(Output::Stream stream) { return ways_[stream == Output::Stream::Out ? 0 : 1]; }
    void watch(Output::Stream stream);
    void unwatch(Way& way);
    void send_some(Output::Stream stream);

    Parts parts_;
    std::array<Way, 2> ways_;
    std::uint64_t under_way_ = 0;
};

/// Writes what is left of the output when the loop has ended. As any program, we wait for who reads us; but a
/// signal that asks us to end is obeyed, which nobody hears any more.
///
/// With a `sender` (null: the consoles are our own) first until the head has shown all lines; what it has not
/// when its session ends, or within `patience`, goes to our own standard streams. Files that are not written
/// after it are said to be waited for.
void write_last_output(Output& output, OutputSender* sender, os::EventLoop& loop, os::Log& log,
                       Duration patience, const std::function<bool()>& has_session);

}  // namespace ddprun
