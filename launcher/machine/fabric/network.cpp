#include "launcher/machine/fabric/network.h"

#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxDeviceFile = 4096;
constexpr std::size_t kMaxHostsFile = std::size_t{1} << 20;

std::string device_text(const std::string& path) {
    return std::string(trim(read_file(path, kMaxDeviceFile).value_or("")));
}

void read_device(NetworkInterface& one) {
    const std::string directory = "/sys/class/net/" + one.name;
    std::error_code error;
    one.is_virtual = !std::filesystem::exists(directory + "/device", error);
    if (const Result<std::int64_t> speed = parse_int(device_text(directory + "/speed")); speed && *speed > 0)
        one.megabits = static_cast<int>(*speed);
    one.mtu = static_cast<int>(parse_int(device_text(directory + "/mtu")).value_or(0));
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
        // A job cannot use a link-local address.
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

/// The driver "mlx5_core" from the link .../device/driver -> ../../bus/pci/drivers/mlx5_core.
std::string driver_of(const std::string& device_directory) {
    std::error_code error;
    return std::filesystem::read_symlink(device_directory + "/device/driver", error).filename().string();
}

std::vector<FabricPort> ports_of(const std::string& root, const std::string& device) {
    std::vector<FabricPort> ports;
    const std::string directory = fmt::format("{}/{}", root, device);
    const std::string driver = driver_of(directory);
    for (const std::string& number : names_in(directory + "/ports")) {
        const std::string port = fmt::format("{}/ports/{}", directory, number);
        const std::string state = device_text(port + "/state");  // "4: ACTIVE"
        const std::size_t colon = state.find(": ");
        ports.push_back({device, static_cast<int>(parse_int(number).value_or(1)),
                         colon == std::string::npos ? state : state.substr(colon + 2),
                         device_text(port + "/rate"), device_text(port + "/link_layer"), driver});
    }
    return ports;
}

}  // namespace

bool is_usable(const NetworkInterface& one) { return one.up && !one.loopback && !one.addresses.empty(); }

void read_fabric_devices(const std::string& sys, NetworkFacts& facts) {
    const std::string root = sys + "/class/infiniband";
    for (const std::string& device : names_in(root)) {
        for (FabricPort& port : ports_of(root, device)) facts.ports.push_back(std::move(port));
    }
    facts.cxi_devices = names_in(sys + "/class/cxi");
}

NetworkFacts detect_network() {
    NetworkFacts facts;
    facts.interfaces = read_interfaces();
    read_fabric_devices("/sys", facts);
    facts.own_name_at = loopback_of_name(read_file("/etc/hosts", kMaxHostsFile).value_or(""), host_name());
    return facts;
}

std::string loopback_of_name(std::string_view hosts, std::string_view name) {
    for (const std::string_view line : split(hosts, '\n')) {
        std::string words(line.substr(0, line.find('#')));
        std::replace(words.begin(), words.end(), '\t', ' ');
        const std::vector<std::string_view> parts = split(trim(words), ' ');
        if (std::find(parts.begin() + 1, parts.end(), name) == parts.end()) continue;
        const std::string_view address = parts.front();
        return address == "::1" || address.starts_with("127.") ? std::string(address) : "";
    }
    return "";
}

std::vector<std::string> nccls_own_interfaces(const std::vector<NetworkInterface>& interfaces) {
    std::vector<std::string> names;
    const auto take = [&](auto fits) {
        if (!names.empty()) return;
        for (const NetworkInterface& one : interfaces) {
            if (one.up && !one.addresses.empty() && fits(one)) names.push_back(one.name);
        }
    };
    take([](const NetworkInterface& one) { return one.name.starts_with("ib"); });
    take([](const NetworkInterface& one) {
        return !one.loopback && !one.name.starts_with("docker") && !one.name.starts_with("virbr");
    });
    take([](const NetworkInterface& one) { return !one.loopback; });
    take([](const NetworkInterface&) { return true; });
    return names;
}

}  // namespace ddprun
