#include "env/io/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstring>
#include <memory>

#include "env/io/background_call.h"
#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

Error no_answer() { return {Errc::Timeout, "the resolver has not answered", 0}; }

std::vector<ResolverAnswer> answers_by(const std::vector<std::string>& keys,
                                       ResolverAnswer (*ask)(const std::string& key), TimePoint deadline) {
    std::vector<BackgroundCall<ResolverAnswer>> calls;
    for (const std::string& key : keys) calls.emplace_back([ask, key] { return ask(key); });
    std::vector<ResolverAnswer> answers;
    for (auto& call : calls) answers.push_back(call.wait(deadline).value_or(no_answer()));
    return answers;
}

ResolverAnswer addresses_of(const std::string& name) {
    const Result<SocketAddresses> found = resolve({name, 0}, 0);
    if (!found) return found.error();
    std::vector<std::string> addresses;
    for (const SocketAddress& one : *found) addresses.push_back(numeric_host(*one.get()));
    return addresses;
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
    // getnameinfo returns only one name, but /etc/hosts may have several on a line.
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

Result<SocketAddresses> resolve(const Endpoint& endpoint, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const char* const host = endpoint.host.empty() ? nullptr : endpoint.host.c_str();
    const int failure = ::getaddrinfo(host, std::to_string(endpoint.port).c_str(), &hints, &found);
    if (failure == EAI_SYSTEM) return Error::system("resolve");
    if (failure != 0) return Error{Errc::NotFound, ::gai_strerror(failure), 0};
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
    SocketAddresses addresses;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
        SocketAddress& address = addresses.emplace_back();
        std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
        address.length = one->ai_addrlen;
    }
    return addresses;
}

Result<SocketAddresses> resolve_by(const Endpoint& endpoint, TimePoint deadline) {
    // A numeric address needs no thread.
    if (Result<SocketAddresses> numeric = resolve(endpoint, AI_NUMERICHOST)) return numeric;
    BackgroundCall<Result<SocketAddresses>> call([endpoint] { return resolve(endpoint, 0); });
    return call.wait(deadline).value_or(no_answer());
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
