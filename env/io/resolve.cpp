#include "env/io/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

struct Question {
    std::function<void()> ask;
    std::shared_ptr<UniqueFd> answered;  ///< an eventfd, which counts

    static void* run(void* argument) {
        const std::unique_ptr<Question> question(static_cast<Question*>(argument));
        question->ask();
        ::eventfd_write(question->answered->get(), 1);
        return nullptr;
    }
};

bool start_thread(Question* question) {
    sigset_t all, before;
    ::sigfillset(&all);
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread{};
    const bool started = ::pthread_create(&thread, &attributes, &Question::run, question) == 0;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_attr_destroy(&attributes);
    return started;
}

/// The answers of those who have answered by the deadline; the others' places say Timeout.
std::vector<ResolverAnswer> answers_by(const std::vector<std::string>& keys,
                                       ResolverAnswer (*ask)(const std::string& key), TimePoint deadline) {
    struct Answers {
        std::vector<std::optional<ResolverAnswer>> each;
        std::vector<std::atomic<bool>> is_there;
        explicit Answers(std::size_t count) : each(count), is_there(count) {}
    };
    const auto answers = std::make_shared<Answers>(keys.size());
    std::vector<std::function<void()>> questions;
    for (std::size_t i = 0; i < keys.size(); ++i) {
        questions.emplace_back([answers, i, key = keys[i], ask] {
            answers->each[i] = ask(key);
            answers->is_there[i].store(true, std::memory_order_release);
        });
    }
    ask_all(std::move(questions), deadline);
    std::vector<ResolverAnswer> told;
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const bool is_there = answers->is_there[i].load(std::memory_order_acquire);
        told.push_back(is_there ? *answers->each[i]
                                : ResolverAnswer(Error{Errc::Timeout, "the resolver has not answered", 0}));
    }
    return told;
}

ResolverAnswer names_of(const std::string& address) {
    sockaddr_in v4{};
    sockaddr_in6 v6{};
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    const bool is_v4 = ::inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1;
    if (!is_v4 && ::inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) != 1)
        return Error{Errc::NotFound, "no address", 0};
    const void* const number = is_v4 ? static_cast<const void*>(&v4.sin_addr) : &v6.sin6_addr;
    // Not getnameinfo, which tells one name only: /etc/hosts has several on a line.
    hostent entry{}, *found = nullptr;
    std::vector<char> room(16 * 1024);
    int failure = 0;
    const int outcome =
        ::gethostbyaddr_r(number, is_v4 ? sizeof v4.sin_addr : sizeof v6.sin6_addr,
                          is_v4 ? AF_INET : AF_INET6, &entry, room.data(), room.size(), &found, &failure);
    if (outcome != 0 || found == nullptr) return Error{Errc::NotFound, ::hstrerror(failure), 0};
    std::vector<std::string> names{found->h_name};
    for (char** alias = found->h_aliases; alias != nullptr && *alias != nullptr; ++alias)
        names.emplace_back(*alias);
    return names;
}

}  // namespace

void ask_all(std::vector<std::function<void()>> questions, TimePoint deadline) {
    const auto answered = std::make_shared<UniqueFd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    std::size_t open = 0;
    for (std::function<void()>& ask : questions) {
        auto question = std::make_unique<Question>(Question{std::move(ask), answered});
        if (*answered && start_thread(question.get())) {
            (void)question.release();  // the thread's now
            ++open;
        } else {
            question->ask();
        }
    }
    while (open > 0) {
        const Result<bool> is_readable = wait_readable(answered->get(), deadline);
        if (!is_readable || !*is_readable) return;
        eventfd_t count = 0;
        if (::eventfd_read(answered->get(), &count) == 0) open -= std::min<std::size_t>(open, count);
    }
}

std::vector<ResolverAnswer> addresses_of_all(const std::vector<std::string>& names, TimePoint deadline) {
    return answers_by(names, &addresses_of, deadline);
}

std::vector<ResolverAnswer> names_of_all(const std::vector<std::string>& addresses, TimePoint deadline) {
    return answers_by(addresses, &names_of, deadline);
}

std::string name_servers() {
    constexpr std::size_t kMostBytes = 64 * 1024;
    std::vector<std::string> servers;
    const std::string text = read_regular_file("/etc/resolv.conf", kMostBytes).value_or("");
    for (const std::string_view line : split(text, '\n')) {
        if (line.starts_with("nameserver ")) servers.emplace_back(trim(line.substr(11)));
    }
    return servers.empty() ? "the system's resolver" : join(servers, " and ") + " (/etc/resolv.conf)";
}

}  // namespace ddprun
