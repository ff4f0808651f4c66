#include "env/nodes/meeting_point.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <array>
#include <optional>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/nodes/exchange.h"
#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::string_view kVersion = "1";

std::string as_hex(std::string_view text) {
    return to_hex({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

bool is_link_local(std::string_view address) {
    return address.starts_with("169.254.") || lower(address.substr(0, 3)) == "fe8" ||
           lower(address.substr(0, 3)) == "fe9" || lower(address.substr(0, 3)) == "fea" ||
           lower(address.substr(0, 3)) == "feb";
}

/// True for bridges that every host has under the same address.
bool is_of_containers(std::string_view interface) {
    for (const char* prefix :
         {"docker", "virbr", "br-", "cni", "podman", "lxcbr", "lxdbr", "flannel", "cali", "tunl"}) {
        if (interface.starts_with(prefix)) return true;
    }
    return false;
}

/// NCCL_SOCKET_IFNAME: a list of prefixes, of names after '=', of excluded prefixes after '^'.
struct InterfaceFilter {
    bool is_exclusion = false, is_exact = false;
    std::vector<std::string_view> names;

    explicit InterfaceFilter(std::string_view text) {
        is_exclusion = text.starts_with('^');
        if (is_exclusion) text.remove_prefix(1);
        is_exact = text.starts_with('=');
        if (is_exact) text.remove_prefix(1);
        for (const std::string_view name : split(text, ',')) {
            if (!name.empty()) names.push_back(name);
        }
    }
    [[nodiscard]] bool names_it(std::string_view interface) const {
        return std::any_of(names.begin(), names.end(), [&](std::string_view name) {
            return is_exact ? interface == name : interface.starts_with(name.substr(0, name.find(':')));
        });
    }
};

/// The address's priority: lower is better, negative is unusable.
int priority_of(const InterfaceAddress& one, const InterfaceFilter& wish) {
    if (!one.is_up || one.is_loopback || is_link_local(one.address)) return -1;
    const bool is_named = wish.names_it(one.interface);
    if (is_named && wish.is_exclusion) return -1;
    if (is_named) return one.address.find(':') == std::string::npos ? 0 : 1;
    if (is_of_containers(one.interface)) return -1;
    return one.address.find(':') == std::string::npos ? 2 : 3;
}

/// The bytes of an address; nullopt when the text is none.
std::optional<std::vector<std::uint8_t>> bytes_of(std::string_view address) {
    const std::string text(address);
    std::array<std::uint8_t, 16> bytes{};
    if (::inet_pton(AF_INET, text.c_str(), bytes.data()) == 1)
        return std::vector<std::uint8_t>(bytes.begin(), bytes.begin() + 4);
    if (::inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1)
        return std::vector<std::uint8_t>(bytes.begin(), bytes.end());
    return std::nullopt;
}

/// A network "10.1.0.0/16", or a single address.
struct Subnet {
    std::vector<std::uint8_t> prefix;
    std::size_t bits = 0;

    [[nodiscard]] bool holds(std::string_view address) const {
        const auto bytes = bytes_of(address);
        if (!bytes || bytes->size() != prefix.size()) return false;
        for (std::size_t bit = 0; bit < bits; ++bit) {
            const int mask = 0x80 >> (bit % 8);
            if ((((*bytes)[bit / 8] ^ prefix[bit / 8]) & mask) != 0) return false;
        }
        return true;
    }
};
/// nullopt when the text is a name rather than a network. Error: InvalidArgument.
Result<std::optional<Subnet>> parse_subnet(std::string_view text) {
    const std::size_t slash = text.find('/');
    auto prefix = bytes_of(text.substr(0, slash));
    if (!prefix && slash == text.npos) return std::optional<Subnet>{};
    const std::size_t most = prefix ? prefix->size() * 8 : 0;
    const Result<std::int64_t> bits =
        slash == text.npos ? Result<std::int64_t>(static_cast<std::int64_t>(most))
                           : parse_int_between(text.substr(slash + 1), 0, static_cast<std::int64_t>(most));
    if (!prefix || !bits)
        return Error{Errc::InvalidArgument,
                     fmt::format("'{}' is neither an interface's name nor a network as 10.1.0.0/16", text),
                     0};
    return std::optional(Subnet{*std::move(prefix), static_cast<std::size_t>(*bits)});
}

/// "lo 127.0.0.1, eth0 10.1.0.7 (down)".
std::string listed(const std::vector<InterfaceAddress>& all) {
    std::vector<std::string> words;
    for (const InterfaceAddress& one : all)
        words.push_back(fmt::format("{} {}{}", one.interface, one.address, one.is_up ? "" : " (down)"));
    return words.empty() ? "no address at all" : join(words, ", ");
}

}  // namespace

Result<std::string> address_on(std::string_view iface, const std::vector<InterfaceAddress>& all) {
    const Result<std::optional<Subnet>> subnet = parse_subnet(iface);
    if (!subnet) return subnet.error();
    const InterfaceAddress* best = nullptr;
    for (const InterfaceAddress& one : all) {
        const bool fits = *subnet ? (*subnet)->holds(one.address) : one.interface == iface;
        if (!fits || !one.is_up || is_link_local(one.address)) continue;
        const auto is_ipv6 = [](const InterfaceAddress& address) {
            return address.address.find(':') != std::string::npos;
        };
        if (best == nullptr || (is_ipv6(*best) && !is_ipv6(one))) best = &one;
    }
    if (best != nullptr) return best->address;
    return Error{Errc::NotFound,
                 fmt::format("this host has no address {} {} for other hosts; it has {}",
                             *subnet ? "in" : "on", iface, listed(all)),
                 0};
}

std::vector<Endpoint> MeetingPoint::endpoints() const {
    std::vector<Endpoint> all;
    for (const std::string& address : addresses) all.push_back({address, port});
    return all;
}

std::string encode(const MeetingPoint& point) {
    std::string word = fmt::format("{}/{}/{}/{}/", kVersion, point.port, point.token, as_hex(point.job));
    for (const std::string& address : point.addresses) {
        if (word.size() + address.size() + 1 > kMaxExchangeValue) break;
        word += address;
        word += ',';
    }
    return word;
}

Result<MeetingPoint> decode_meeting_point(std::string_view word) {
    // Do not show the word: it holds the secret.
    const Error malformed{
        Errc::Protocol, "the first process's meeting point is malformed: is it of another version of ddprun?",
        0};
    const std::vector<std::string_view> parts = split(word, '/');
    if (parts.size() != 5 || parts[0] != kVersion || parts[2].empty()) return malformed;
    const Result<std::int64_t> port = parse_int_between(parts[1], 1, 65535);
    const Result<std::string> job = from_hex(parts[3]);
    if (!port || !job) return malformed;
    MeetingPoint point{*job, std::string(parts[2]), static_cast<std::uint16_t>(*port), {}};
    for (const std::string_view address : split(parts[4], ',')) {
        if (!address.empty()) point.addresses.emplace_back(address);
    }
    if (point.addresses.empty()) return malformed;
    return point;
}

std::vector<std::string> reachable_addresses(const std::vector<InterfaceAddress>& all,
                                             std::string_view wish) {
    const InterfaceFilter wanted(wish);
    std::vector<std::pair<int, std::string>> found;
    for (const InterfaceAddress& one : all) {
        if (const int priority = priority_of(one, wanted); priority >= 0)
            found.emplace_back(priority, one.address);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> addresses;
    for (auto& [priority, address] : found) addresses.push_back(std::move(address));
    if (!addresses.empty()) return addresses;
    for (const InterfaceAddress& one : all) {
        if (one.is_loopback && one.is_up) addresses.push_back(one.address);
    }
    return addresses;
}

std::vector<InterfaceAddress> list_interfaces() {
    std::vector<InterfaceAddress> found;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return found;
    for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr) continue;
        std::string address = numeric_host(*one->ifa_addr);
        if (address.empty()) continue;
        const bool is_up = (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_RUNNING) != 0;
        found.push_back({one->ifa_name, std::move(address), (one->ifa_flags & IFF_LOOPBACK) != 0, is_up});
    }
    ::freeifaddrs(list);
    return found;
}

std::string host_identity() {
    // Encode in hexadecimal: a name may have characters that no word allows.
    return as_hex(host_name()) + "." + as_hex(boot_id());
}

}  // namespace ddprun
