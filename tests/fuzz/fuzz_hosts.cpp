#include "env/nodes/allocation.h"
#include "env/nodes/host_lists.h"
#include "launcher/start/start_order.h"
#include "launcher/start/starter_command.h"
#include "tests/fuzz/mutation.h"
#include "tests/fuzz/program.h"

/// Every text by which somebody says which hosts a job has, or what a host is to do: host files, node files,
/// a scheduler's lists, the head's order.
namespace ddprun::test {
namespace {

StartOrder an_order() {
    StartOrder order;
    order.arguments = {"--nproc-per-node=2", "train"};
    order.directory = "/work";
    order.environment = {"PATH=/bin", "A="};
    order.hosts = {"h1", "h2"};
    order.slots = {4, 0};
    order.run_id = "5[0].server";
    order.program = {"/work/train", 31, "sha256 5f"};
    return order;
}

/// An application of PALS: two ranks on one host.
std::string an_apinfo() {
    std::string bytes(252, '\0');
    bytes[0] = 5;
    bytes[64] = 12, bytes[72] = static_cast<char>(160), bytes[80] = 2;
    bytes[88] = 68, bytes[96] = static_cast<char>(184), bytes[104] = 1;
    bytes[172] = 1;
    bytes.replace(188, 2, "n1");
    return bytes;
}

template <class T>
void check(const Result<T>& result) {
    if (!result) check_error(result.error().what);
}

void check_hosts(const Result<std::vector<AllocatedHost>>& hosts) {
    if (!hosts) return check_error(hosts.error().what);
    for (const AllocatedHost& host : *hosts) {
        // What would be an option, or two words, to the program that starts something there.
        if (host.name.empty() || host.name.front() == '-' ||
            host.name.find_first_of(" \n\t'\"$`;") != std::string::npos)
            broken("a name that a starter cannot be given", host.name);
        if (host.slots.value_or(1) < 1) broken("a host without room", host.name);
    }
}

}  // namespace

const int kIterations = 5'000;

void take(std::string_view bytes) {
    const std::string text(bytes);
    check_hosts(parse_hostfile(text));
    check_hosts(parse_hosts(text));
    check_hosts(parse_node_file(text));
    check(expand_hostlist(text));
    check(parse_tasks_per_node(text));
    const Result<PalsApplication> application = parse_apinfo(text);
    check(application);
    if (application && (application->ranks.empty() || application->hosts.empty()))
        broken("an application without ranks or hosts", text);
    const Result<StartOrder> order = decode_start_order(text);
    check(order);
    if (order && order->slots.size() != order->hosts.size()) broken("hosts without their slots", text);
    std::vector<std::string> words;
    for (std::size_t at = 0, end = 0; end != text.npos; at = end + 1) {
        end = text.find(' ', at);
        words.push_back(text.substr(at, end - at));
    }
    check(parse_agent_words(words));
    // A scheduler's variables, and the files they name, all with this in them.
    AllocationQuery query{[&](std::string_view) { return text; },
                          [&](const std::string&) { return Result<std::string>(text); }, "", ""};
    check(find_allocation(query));
}

std::vector<std::string> seeds() {
    return {an_apinfo(),
            "# rack\nn1 slots=4 max_slots=8\nn2:2 ; x\n\nme@n3\nr[08-10]\na b\n2001:db8::1\n",
            "h1\nh1\nh2.site.org\n",
            "n[01-03,07],r[1-2]n[0-3],gpu1:8",
            "2(x3),1",
            "h1 4 h2 8",
            encode(an_order()),
            "--at h1:4711,10.0.0.1:4711 --job 12.server --secret stdin --node 2"};
}

std::string mutated(const std::vector<std::string>& all, int, std::mt19937& random) {
    std::string text = all[random() % all.size()];
    for (std::size_t changes = 1 + random() % 4; changes > 0; --changes) mutate(text, all, random);
    return text;
}

}  // namespace ddprun::test
