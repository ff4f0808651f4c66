#include "launcher/node/nccl_words.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <utility>

#include "env/io/proc.h"
#include "launcher/machine/fabric/transport.h"

namespace ddprun {

namespace {

constexpr std::size_t kMostOfALine = 4096;  ///< longer lines are not about the network

}  // namespace

Result<std::unique_ptr<NcclWords>> NcclWords::open(os::EventLoop& loop,
                                                   std::function<void(const std::string&)> found) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe2");
    UniqueFd read(ends[0]), write(ends[1]);
    if (::fcntl(read.get(), F_SETFL, O_NONBLOCK) != 0) return Error::system("fcntl");
    std::unique_ptr<NcclWords> words(
        new NcclWords(loop, std::move(read), std::move(write), std::move(found)));
    const Status watched =
        loop.watch(words->read_.get(), EPOLLIN, [raw = words.get()](std::uint32_t) { raw->on_readable(); });
    if (!watched) return watched.error();
    return words;
}

NcclWords::NcclWords(os::EventLoop& loop, UniqueFd read, UniqueFd write,
                     std::function<void(const std::string&)> found)
    : loop_(loop), read_(std::move(read)), write_(std::move(write)), found_(std::move(found)) {}

NcclWords::~NcclWords() { loop_.unwatch(read_.get()); }

std::string NcclWords::path() const {
    return fmt::format("/proc/{}/fd/{}", own_number_in_proc(), write_.get());
}

void NcclWords::on_readable() {
    char bytes[16 * 1024];
    const ssize_t n = ::read(read_.get(), bytes, sizeof bytes);
    if (n > 0) take({bytes, static_cast<std::size_t>(n)});
}

void NcclWords::take(std::string_view bytes) {
    for (const char c : bytes) {
        if (c != '\n') {
            if (line_.size() < kMostOfALine) line_ += c;
            continue;
        }
        const std::optional<std::string> network = network_in(line_);
        line_.clear();
        if (network && found_) std::exchange(found_, nullptr)(*network);
    }
}

}  // namespace ddprun
