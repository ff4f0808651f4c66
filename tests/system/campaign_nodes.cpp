// Faults of nodes against recovery in place, on hosts of this machine: every run has to end with the digest
// of an undisturbed one. Each fault also meets jobs that restart (--recover=restart), whose times stand
// beside.
//   campaign_nodes RUNS [FAULT]    RUNS runs of each fault, or of one; and a fifth as many that restart
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <ranges>
#include <stdexcept>
#include <vector>

#include "env/unique_fd.h"
#include "tests/support/comes.h"
#include "tests/support/hosts.h"
#include "tests/support/run_program.h"
#include "tests/system/campaign.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kNodes = 3, kSpares = 2;

/// A job of kNodes nodes with a rank of train each, and kSpares spares.
class NodesJob {
  public:
    NodesJob(Hosts& hosts, const std::vector<std::string>& options) : mark_(unique_name("CAMPAIGN=nodes")) {
        static int runs = 0;
        directory_ = fmt::format("{}/run-{}", hosts.shared(), ++runs);
        std::filesystem::create_directory(directory_);
        for (int host = 0; host < kNodes + kSpares; ++host) {
            std::vector<std::string> words{"env",
                                           mark_,
                                           "DDPRUN_TOKEN=secret of the job",
                                           "sh",
                                           "-c",
                                           "exec \"$@\" >" + output(host) + " 2>&1",
                                           "sh",
                                           path_of("DDPRUN"),
                                           fmt::format("--nnodes={}", kNodes),
                                           "--nproc-per-node=1",
                                           "--master-addr=node00",
                                           "--master-port=29400",
                                           "--heartbeat-timeout=2s",
                                           "--max-restarts=3"};
            words.insert(words.end(), options.begin(), options.end());
            if (host < kNodes) words.push_back(fmt::format("--node-rank={}", host));
            // A spare that comes before a node would take its place.
            if (host == kNodes && !comes([&] { return says("epoch  1/"); })) break;
            words.insert(words.end(),
                         {path_of("TRAIN"), "--device=cpu", "--data=synthetic:6000,32,10", "--hidden=256",
                          "--epochs=60", "--batch-size=32", "--optimizer=adamw", "--clip=1",
                          "--checkpoint-every=1000", "--checkpoint-dir=" + directory_ + "/checkpoints"});
            nodes_.push_back(std::make_unique<Program>(hosts.command(host, words)));
        }
    }
    ~NodesJob() {
        nodes_.clear();
        std::filesystem::remove_all(directory_);
    }
    NodesJob(const NodesJob&) = delete;
    NodesJob& operator=(const NodesJob&) = delete;

    /// True when all nodes train and the spares wait.
    [[nodiscard]] bool runs() const {
        return std::ssize(nodes_) == kNodes + kSpares && comes([&] {
                   return std::ranges::all_of(std::views::iota(kNodes, kNodes + kSpares), [&](int host) {
                       return content_of(output(host)).find("a spare") != std::string::npos;
                   });
               });
    }
    void kill(int host) const { nodes_[static_cast<std::size_t>(host)]->signal(SIGKILL); }
    /// Closes a connection between the worker of a node and that of another; false where there is none.
    [[nodiscard]] bool break_link(int host) const {
        const std::string rank = '\0' + fmt::format("RANK={}", host) + '\0';
        for (const pid_t pid : processes_with(mark_)) {
            if (content_of(fmt::format("/proc/{}/comm", pid)) != "train\n") continue;
            const std::string environment = content_of(fmt::format("/proc/{}/environ", pid));
            if (environment.find(rank) == std::string::npos) continue;
            if (shut_down_link(pid)) return true;
        }
        return false;
    }
    [[nodiscard]] std::string all() const {
        std::string text;
        for (int host = 0; host < kNodes + kSpares; ++host) text += content_of(output(host));
        return text;
    }
    [[nodiscard]] bool says(const std::string& text) const { return all().find(text) != std::string::npos; }
    [[nodiscard]] int epochs() const { return occurrences(all(), "\nepoch "); }
    /// Waits for the end of the job's nodes. Returns the digest; "" where none was told.
    std::string end() {
        // The isolated node ends too, and a spare that was not needed is told.
        for (const std::unique_ptr<Program>& node : nodes_) (void)node->wait();
        return digest_in(all());
    }

  private:
    [[nodiscard]] std::string output(int host) const { return fmt::format("{}/{}.out", directory_, host); }
    static bool shut_down_link(pid_t pid) {
        const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
        std::error_code gone;
        for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), gone)) {
            const UniqueFd copy(static_cast<int>(
                ::syscall(SYS_pidfd_getfd, process.get(), std::stoi(entry.path().filename()), 0)));
            sockaddr_in peer{};
            socklen_t bytes = sizeof(peer);
            if (::getpeername(copy.get(), reinterpret_cast<sockaddr*>(&peer), &bytes) != 0 ||
                peer.sin_family != AF_INET || ntohl(peer.sin_addr.s_addr) >> 24 == 127)
                continue;
            return ::shutdown(copy.get(), SHUT_RDWR) == 0;
        }
        return false;
    }

    std::string mark_, directory_;
    std::vector<std::unique_ptr<Program>> nodes_;
};

struct Fault {
    const char* name;
    /// Breaks something of the job; returns what mends it after the run.
    std::function<std::function<void()>(NodesJob&, Hosts&, std::mt19937&)> strike;
    bool may_be_harmless = false;  ///< the job may go on without a recovery, and has nothing to restart for
    std::vector<std::string> options = {};  ///< of the job that recovers in place
};

/// From the fault, in milliseconds.
struct Times {
    std::vector<double> back;        ///< until ddprun says that all ranks are back, or that it restarts
    std::vector<double> next_epoch;  ///< and until rank 0 has ended an epoch after that
    void print(const std::string& what) {
        const auto row = [](std::vector<double>& all) {
            std::sort(all.begin(), all.end());
            return all.empty() ? std::string("-")
                               : fmt::format("{:.0f}, {:.0f} ms", all[all.size() / 2], all.back());
        };
        fmt::print("{:<44} {:>20} {:>20}\n", what, row(back), row(next_epoch));
    }
};

/// One run with the fault. Returns the digest.
std::string run_with(const Fault& fault, Hosts& hosts, bool in_place, std::mt19937& random, Times& times,
                     std::string& output) {
    NodesJob job(hosts, in_place ? fault.options : std::vector<std::string>{"--recover=restart"});
    if (!job.runs()) {
        output = "the job did not begin:\n" + job.all();
        return "";
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 700'000));
    const Clock::time_point begin = Clock::now();
    const auto since = [&] {
        return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    };
    const std::function<void()> mend = fault.strike(job, hosts, random);
    const std::string back = in_place ? "] recovered after " : "restart 1 of 3";
    const bool is_back =
        comes([&] { return job.says(back) || job.says("bitwise equal"); }, 60s) && job.says(back);
    if (is_back) {
        times.back.push_back(since());
        const int epochs = job.epochs();
        if (comes([&] { return job.epochs() > epochs; })) times.next_epoch.push_back(since());
    }
    if (mend) mend();
    const std::string digest = job.end();
    output = job.all();
    return is_back || fault.may_be_harmless ? digest : "";
}

int campaign(int runs, const std::string& only) {
    std::setbuf(stdout, nullptr);
    if (const auto reason = Hosts::why_not()) {
        fmt::print("skipped: {}\n", *reason);
        return 77;
    }
    std::mt19937 random(static_cast<unsigned>(::getpid()));
    Hosts hosts(kNodes + kSpares);
    const auto killed = [](int host) {
        return
            [host](NodesJob& job, Hosts&, std::mt19937&) { return job.kill(host), std::function<void()>(); };
    };
    const auto cut = [](int host) {
        return [host](NodesJob&, Hosts& of, std::mt19937&) {
            of.cut_cable(host);
            return std::function<void()>([&of, host] { of.mend_cable(host); });
        };
    };
    const auto spare_too = [](NodesJob& job, Hosts&, std::mt19937& at) {
        job.kill(1);
        std::this_thread::sleep_for(std::chrono::microseconds(at() % 400'000));
        return job.kill(kNodes), std::function<void()>();
    };
    // libfabric's tcp provider connects again. Where a message was under way it is lost, and the rank that
    // waits for it is found as a hang.
    const auto link = [](NodesJob& job, Hosts&, std::mt19937&) {
        if (!job.break_link(1)) throw std::runtime_error("rank 1 has no connection to another node");
        return std::function<void()>();
    };
    std::string output;
    const std::string expected = [&] {
        NodesJob job(hosts, {});
        (void)job.runs();
        return job.end();
    }();
    std::vector<Row> rows;
    std::vector<std::pair<std::string, Times>> all_times;
    print_head();
    for (const Fault& fault : {Fault{"SIGKILL of a node", killed(1)}, Fault{"SIGKILL of the head", killed(0)},
                               Fault{"cable of a node", cut(2)}, Fault{"cable of the head", cut(0)},
                               Fault{"spare dies when taken", spare_too},
                               Fault{"one link", link, true, {"--recover-within=5s"}}}) {
        if (!only.empty() && only != fault.name) continue;
        Row row{fault.name};
        Times in_place, restarts;
        for (; row.runs < runs; ++row.runs) {
            const std::string digest = run_with(fault, hosts, true, random, in_place, output);
            if (!digest.empty() && digest == expected) ++row.equal;
            else if (row.otherwise.empty()) row.otherwise = output;
        }
        for (int i = 0; i < runs / 5 && !fault.may_be_harmless; ++i)
            (void)run_with(fault, hosts, false, random, restarts, output);
        print(row);
        rows.push_back(row);
        all_times.emplace_back(fault.name, in_place);
        if (!restarts.back.empty()) all_times.emplace_back(std::string(fault.name) + ", restart", restarts);
    }
    fmt::print("{:<44} {:>20} {:>20}\n", "p50 and most, from the fault", "until back", "next epoch");
    for (auto& [what, times] : all_times) times.print(what);
    return std::ranges::all_of(rows, [](const Row& row) { return row.runs == row.equal; }) ? 0 : 1;
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    return ddprun::test::campaign(argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? argv[2] : "");
}
