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

/// The consoles of an Output whose lines another ddprun shows (Output::show_sent): reads what Output writes,
/// and sends it.
///
/// No more than `window` bytes that the other side has not shown are under way. The rest waits in the sockets
/// that Output writes to, then in Output, then in the workers' pipes: workers wait as they wait for any slow
/// console. On the loop's thread.
class OutputSender {
  public:
    struct Parts {
        os::EventLoop& loop;
        std::size_t window;  ///< bytes
        /// False: there is no session any more, and nothing was sent.
        std::function<bool(Output::Stream stream, std::string bytes)> send;
    };
    /// Sends nothing before begin(). Error: System (no sockets).
    static Result<std::unique_ptr<OutputSender>> create(Parts parts);
    ~OutputSender();
    OutputSender(const OutputSender&) = delete;
    OutputSender& operator=(const OutputSender&) = delete;

    /// What Output writes a stream to; lives as long as this object.
    [[nodiscard]] int console(Output::Stream stream) const { return way_of(stream).writing.get(); }
    /// A session has begun, the first or, where the last one is lost, another.
    void begin();
    /// The other side has shown so many bytes more.
    void shown(std::uint64_t bytes);
    /// All that Output has written so far has been shown by the other side.
    [[nodiscard]] bool is_done() const;
    /// For the end, where the session was lost: writes what was not sent to these descriptors. Blocks as long
    /// as they do.
    void write_rest(int out, int err);

  private:
    struct Way {
        UniqueFd reading, writing;
        bool is_watched = false;
        std::string unsent;  ///< was read, and could not be sent
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
