#include "env/nodes/exchange.h"

#include <fmt/core.h>
#include <sys/socket.h>

#include <cerrno>
#include <map>

#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::size_t kMaxPmiLine = 4096;
constexpr Duration kPmiFarewell = std::chrono::seconds(2);

using Words = std::map<std::string, std::string, std::less<>>;

/// Parses "cmd=get_result rc=0 value=x"; the last value may have blanks (value=..., msg=...).
Words words_of(std::string_view line) {
    Words words;
    for (const std::string_view piece : split(line, ' ')) {
        const std::size_t equals = piece.find('=');
        if (equals != piece.npos) words.emplace(piece.substr(0, equals), piece.substr(equals + 1));
    }
    return words;
}

std::string word(const Words& words, std::string_view name) {
    const auto found = words.find(name);
    return found == words.end() ? std::string() : found->second;
}

class PmiExchange final : public Exchange {
  public:
    PmiExchange(int fd, int rank, TimePoint deadline) : fd_(fd), rank_(rank), deadline_(deadline) {}

    /// Sends finalize: the launcher takes a process that ends without it for crashed and kills the whole job.
    ~PmiExchange() override {
        if (!is_begun_ || is_broken_) return;
        deadline_ = deadline_after(MonotonicClock::now(), kPmiFarewell);
        static_cast<void>(ask("cmd=finalize", "finalize_ack"));
    }

    Status begin() {
        const Result<Words> welcome = ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init");
        if (!welcome) return welcome.error();
        is_begun_ = true;
        const Result<Words> name = ask("cmd=get_my_kvsname", "my_kvsname");
        if (!name) return name.error();
        kvs_ = word(*name, "kvsname");
        return kvs_.empty() ? Status(fail(Errc::Protocol, "a key-value space without a name")) : Status();
    }

    Status put(std::string_view key, std::string_view value) override {
        if (const Status checked = check_exchange_word(key, kMaxExchangeKey); !checked) return checked;
        if (const Status checked = check_exchange_word(value, kMaxExchangeValue); !checked) return checked;
        const Result<Words> answer =
            ask(fmt::format("cmd=put kvsname={} key={} value={}", kvs_, full_key(rank_, key), value),
                "put_result");
        return answer ? Status() : Status(answer.error());
    }

    Status fence() override {
        const Result<Words> out = ask("cmd=barrier_in", "barrier_out");
        return out ? Status() : Status(out.error());
    }

    Result<std::string> get(int rank, std::string_view key) override {
        const Result<Words> answer =
            exchange_lines(fmt::format("cmd=get kvsname={} key={}", kvs_, full_key(rank, key)), "get_result");
        if (!answer) return answer.error();
        std::string value = word(*answer, "value");
        if (word(*answer, "rc") == "0" && !value.empty()) return value;
        return Error{Errc::NotFound, fmt::format("{}: rank {} has put no '{}'", name(), rank, key), 0};
    }

  private:
    static std::string full_key(int rank, std::string_view key) {
        return fmt::format("ddprun-{}-{}", rank, key);
    }
    [[nodiscard]] std::string name() const { return fmt::format("PMI on descriptor {}", fd_); }

    /// Marks the stream as unusable and returns the error.
    Error fail(Errc code, const std::string& what) {
        is_broken_ = true;
        return {code, fmt::format("{}: {}", name(), what), 0};
    }

    /// Calls exchange_lines and checks the answer's rc.
    Result<Words> ask(const std::string& request, std::string_view expected) {
        Result<Words> answer = exchange_lines(request, expected);
        if (!answer) return answer;
        const std::string rc = word(*answer, "rc");
        if (rc.empty() || rc == "0") return answer;
        return fail(Errc::Protocol,
                    fmt::format("'{}' was answered rc={} {}", request.substr(0, request.find(' ')),
                                excerpt(rc), excerpt(word(*answer, "msg"))));
    }

    Result<Words> exchange_lines(const std::string& request, std::string_view expected) {
        if (is_broken_) return Error{Errc::Closed, name() + ": the conversation has failed before", 0};
        if (const Status sent = send_all(fd_, request + "\n", deadline_); !sent)
            return broken_by(sent.error(), expected);
        Result<std::string> line = receive_line(expected);
        if (!line) return line.error();
        Words words = words_of(*line);
        if (word(words, "cmd") == expected) return words;
        return fail(Errc::Protocol, fmt::format("'{}' in place of cmd={}", excerpt(*line), expected));
    }

    Error broken_by(const Error& error, std::string_view expected) {
        const std::string doing = fmt::format("waiting for {}", expected);
        if (error.code == Errc::Closed)
            return fail(Errc::Closed, fmt::format("{}: the launcher closed it", doing));
        if (error.code == Errc::Timeout)
            return fail(
                Errc::Timeout,
                fmt::format("{}: no answer in time; did all processes of the launcher reach it?", doing));
        is_broken_ = true;
        return error.with(fmt::format("{}: {}", name(), doing));
    }

    Result<std::string> receive_line(std::string_view expected) {
        for (;;) {
            if (const std::size_t end = received_.find('\n'); end != received_.npos) {
                std::string line = received_.substr(0, end);
                received_.erase(0, end + 1);
                return line;
            }
            if (received_.size() > kMaxPmiLine)
                return fail(Errc::Protocol, fmt::format("a line of more than {} bytes", kMaxPmiLine));
            if (const Status more = receive_some(); !more) return broken_by(more.error(), expected);
        }
    }

    Status receive_some() {
        char piece[1024];
        const ssize_t got = ::recv(fd_, piece, sizeof piece, MSG_DONTWAIT);
        if (got > 0) {
            received_.append(piece, static_cast<std::size_t>(got));
            return {};
        }
        if (got == 0 || errno == ECONNRESET) return Error{Errc::Closed, "closed", 0};
        if (errno != EAGAIN && errno != EINTR) return Error::system("receive");
        const Result<bool> ready = wait_readable(fd_, deadline_);
        if (!ready) return ready.error();
        return *ready ? Status() : Status(Error{Errc::Timeout, "timed out", 0});
    }

    int fd_;
    int rank_;
    TimePoint deadline_;
    std::string kvs_;
    std::string received_;
    bool is_begun_ = false;
    bool is_broken_ = false;
};

}  // namespace

Result<std::unique_ptr<Exchange>> open_pmi_exchange(int fd, int rank, TimePoint deadline) {
    auto exchange = std::make_unique<PmiExchange>(fd, rank, deadline);
    if (const Status begun = exchange->begin(); !begun) return begun.error();
    return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace ddprun
