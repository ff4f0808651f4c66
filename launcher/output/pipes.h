#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Reads pipes while their owner has room; never blocks.
///
/// Events announce the first bytes at once; while more arrive, a timer polls the pipe, as network drivers do
/// under load: every write into a watched pipe costs the worker and us a wake-up.
class PipeReader {
  public:
    /// One pipe, the base of the owner's own type.
    class Pipe {
      public:
        /// Takes the non-blocking read end.
        explicit Pipe(UniqueFd fd);

        /// True when the pipe holds bytes that were not read.
        [[nodiscard]] bool has_unread() const;

      private:
        friend class PipeReader;
        UniqueFd fd_;
        std::size_t capacity_ = 0;
        TimePoint last_read_{};
        bool is_watched_ = false;  ///< read on events of the loop
        bool is_resting_ = false;  ///< read by the timer
        bool is_paused_ = false;   ///< not read at all
    };
    /// Called on the loop's thread.
    class Owner {
      public:
        virtual ~Owner() = default;
        /// False: the owner has no room and has paused the pipe.
        virtual bool make_room(Pipe& pipe) = 0;
        virtual void on_read(Pipe& pipe, std::string_view bytes) = 0;
        /// All writers of the pipe are gone. The owner must remove() it and may destroy it in here.
        virtual void on_end(Pipe& pipe) = 0;
        /// No more can be read for now.
        virtual void on_pause_in_reading() = 0;
        /// A pipe can no longer be read. `why`: System (epoll).
        virtual void on_unreadable(const Error& why) = 0;
    };
    /// Both are borrowed for its life.
    PipeReader(os::EventLoop& loop, Owner& owner);
    ~PipeReader();
    PipeReader(const PipeReader&) = delete;
    PipeReader& operator=(const PipeReader&) = delete;

    /// Borrows the pipe until remove(). Error: System (epoll).
    Status add(Pipe& pipe);
    void remove(Pipe& pipe);
    /// Stops reading the pipe until resume().
    void pause(Pipe& pipe);
    void resume(Pipe& pipe);
    /// Reads what the pipe holds, even without room; at most 2 MiB, for a writer that never stops.
    void read_rest(Pipe& pipe);

  private:
    Status watch(Pipe& pipe);
    void unwatch(Pipe& pipe);
    void watch_again(Pipe& pipe);
    void on_readable(int fd);
    void rest(Pipe& pipe);
    void read_resting();
    ssize_t read_once(Pipe& pipe);

    os::EventLoop& loop_;
    Owner& owner_;
    std::unordered_map<int, Pipe*> pipes_;
    std::vector<int> resting_;  ///< the timer runs while this is not empty
    os::EventLoop::TimerId timer_ = 0;
    std::unique_ptr<char[]> buffer_;  ///< not zeroed: each start would touch all of it
};

/// Passes the input of ddprun's terminal on to one worker.
///
/// A worker is in a process group of its own, in the background of the terminal: reading it directly would
/// stop it (SIGTTIN). So ddprun, in the foreground, reads and writes into a pipe that is the worker's
/// standard input. When the worker does not read, ddprun does not either; end-of-file (Ctrl-D) is passed on.
/// A standard input that is no terminal needs no relay: the worker inherits it.
class StdinRelay {
  public:
    /// `input` is borrowed; `worker` is the non-blocking write end of the worker's standard input.
    StdinRelay(os::EventLoop& loop, int input, UniqueFd worker);
    ~StdinRelay();
    StdinRelay(const StdinRelay&) = delete;
    StdinRelay& operator=(const StdinRelay&) = delete;

  private:
    void read_input();
    void write_worker();
    void finish();

    os::EventLoop& loop_;
    int input_;
    UniqueFd worker_;
    std::string pending_;
};

}  // namespace ddprun
