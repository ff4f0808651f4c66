#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "env/io/socket.h"
#include "env/text.h"
#include "launcher/doctor/collect.h"

namespace ddprun::doctor {
namespace {

std::vector<std::string> names_in(const std::string& directory) {
    std::vector<std::string> names;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(directory, error))
        names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

void read_device(NetworkInterface& one) {
    const std::string directory = "/sys/class/net/" + one.name;
    std::error_code error;
    one.is_virtual = !std::filesystem::exists(directory + "/device", error);
    if (const Result<std::int64_t> speed = parse_int(content_of(directory + "/speed")); speed && *speed > 0)
        one.megabits = static_cast<int>(*speed);
    one.mtu = static_cast<int>(parse_int(content_of(directory + "/mtu")).value_or(0));
}

std::vector<NetworkInterface> read_interfaces() {
    std::map<std::string, NetworkInterface> found;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return {};
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
    for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
        NetworkInterface& one = found[at->ifa_name];
        one.name = at->ifa_name;
        one.up = (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_RUNNING) != 0;
        one.loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
        if (at->ifa_addr == nullptr) continue;
        // A link-local address is no address for a job.
        if (const std::string address = numeric_host(*at->ifa_addr);
            !address.empty() && !address.starts_with("fe80:"))
            one.addresses.push_back(address);
    }
    std::vector<NetworkInterface> interfaces;
    for (auto& [name, one] : found) {
        read_device(one);
        interfaces.push_back(std::move(one));
    }
    return interfaces;
}

std::vector<FabricPort> read_ports() {
    constexpr std::string_view kRoot = "/sys/class/infiniband";
    std::vector<FabricPort> ports;
    for (const std::string& device : names_in(std::string(kRoot))) {
        for (const std::string& number : names_in(fmt::format("{}/{}/ports", kRoot, device))) {
            const std::string directory = fmt::format("{}/{}/ports/{}", kRoot, device, number);
            const std::string state = content_of(directory + "/state");  // "4: ACTIVE"
            const std::size_t colon = state.find(": ");
            ports.push_back({device, static_cast<int>(parse_int(number).value_or(1)),
                             colon == std::string::npos ? state : state.substr(colon + 2),
                             content_of(directory + "/rate"), content_of(directory + "/link_layer")});
        }
    }
    return ports;
}

}  // namespace

NetworkFacts collect_network() {
    NetworkFacts facts;
    facts.interfaces = read_interfaces();
    facts.ports = read_ports();
    facts.has_slingshot =
        !names_in("/sys/class/cxi").empty() ||
        std::any_of(facts.interfaces.begin(), facts.interfaces.end(),
                    [](const NetworkInterface& one) { return one.name.starts_with("hsn"); });
    return facts;
}

}  // namespace ddprun::doctor
