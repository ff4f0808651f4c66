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

/// Reads pipes, as far as their owner has room; never blocks.
///
/// As network drivers do under load: events tell of the first bytes at once; while more keep coming, a pipe
/// is looked at by the clock. Every write of a worker into a watched pipe costs it and us a wake-up.
class PipeReader {
  public:
    /// One pipe; whoever has more to say of it derives from it.
    class Pipe {
      public:
        /// Takes the non-blocking read end.
        explicit Pipe(UniqueFd fd);

      private:
        friend class PipeReader;
        UniqueFd fd_;
        std::size_t capacity_ = 0;
        TimePoint last_read_{};
        bool is_watched_ = false;  ///< the loop tells when there is something to read
        bool is_resting_ = false;  ///< read by the clock instead
        bool is_paused_ = false;   ///< not read at all
    };
    /// Called on the loop's thread.
    class Owner {
      public:
        virtual ~Owner() = default;
        /// False: what it says cannot be taken now, and it was paused.
        virtual bool make_room(Pipe& pipe) = 0;
        virtual void on_read(Pipe& pipe, std::string_view bytes) = 0;
        /// All its writers are gone. To be removed, and may be destroyed in here.
        virtual void on_end(Pipe& pipe) = 0;
        /// All has been read that there is room and reason for now.
        virtual void on_pause_in_reading() = 0;
        /// It is not read any more. Error: System (epoll).
        virtual void on_unreadable(const Error& why) = 0;
    };
    /// Both are borrowed for its life.
    PipeReader(os::EventLoop& loop, Owner& owner);
    ~PipeReader();
    PipeReader(const PipeReader&) = delete;
    PipeReader& operator=(const PipeReader&) = delete;

    /// Borrowed until it is removed. Error: System (epoll).
    Status add(Pipe& pipe);
    void remove(Pipe& pipe);
    /// Reads nothing of it until it is resumed.
    void pause(Pipe& pipe);
    void resume(Pipe& pipe);
    /// Reads what is in it now, whether there is room or not, but not for ever where its writer never stops.
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
    std::vector<int> resting_;  ///< while it is not empty, the timer runs
    os::EventLoop::TimerId timer_ = 0;
    std::string buffer_;
};

}  // namespace ddprun
