#pragma once

#include <fcntl.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "ddp/net/across_nodes.h"
#include "ddp/testing.h"
#include "env/worker_env.h"

namespace ddp::testing {

/// A world of several nodes in one process: ranks are threads, each node has its own segment, and a real link
/// over the loopback connects them.
class SeveralNodes {
  public:
    using Ranks = std::vector<std::vector<int>>;  ///< by node
    explicit SeveralNodes(const std::vector<int>& numbers,
                          std::chrono::nanoseconds timeout = std::chrono::seconds(60))
        : SeveralNodes(one_after_the_other(numbers), timeout) {}
    explicit SeveralNodes(Ranks ranks, std::chrono::nanoseconds timeout = std::chrono::seconds(60))
        : ranks_(std::move(ranks)), options_{.timeout = timeout} {
        for (const auto& node : ranks_) size_ += static_cast<int>(node.size());
        for (const auto& node : ranks_) {
            segments_.push_back(make_segment({.local_world_size = static_cast<std::uint32_t>(node.size()),
                                              .world_size = static_cast<std::uint32_t>(size_),
                                              .first_rank = static_cast<std::uint32_t>(node.front())}));
        }
    }
    [[nodiscard]] int size() const { return size_; }
    /// The values that ranks have put into the store, by key.
    [[nodiscard]] const std::map<std::string, std::string>& words() const { return values_; }
    /// Replaces libfabric's links over the loopback.
    void set_links(std::function<std::unique_ptr<net::Link>()> open) { open_link_ = std::move(open); }

    std::vector<std::exception_ptr> failures(const std::function<void(ProcessGroup&)>& fn) {
        std::vector<std::exception_ptr> failed(static_cast<std::size_t>(size_));
        std::vector<std::thread> threads;
        for (std::size_t node = 0; node < ranks_.size(); ++node) {
            for (std::size_t local = 0; local < ranks_[node].size(); ++local) {
                const int rank = ranks_[node][local];
                threads.emplace_back(
                    [this, node, local, rank, &fn, &failure = failed[static_cast<std::size_t>(rank)]] {
                        try {
                            fn(*group_of(node, local, rank, options_));
                        } catch (...) {
                            failure = std::current_exception();
                            if (ends_generation_) end_generation(rank);
                        }
                    });
            }
        }
        for (std::thread& thread : threads) thread.join();
        return failed;
    }
    void run(const std::function<void(ProcessGroup&)>& fn) {
        ends_generation_ = true;
        for (const std::exception_ptr& failure : failures(fn)) {
            if (failure) std::rethrow_exception(failure);
        }
    }
    /// Lets only the first rank of a node join; throws its exception.
    void join_alone(std::size_t node, std::chrono::nanoseconds timeout) {
        ProcessGroupOptions impatient = options_;
        impatient.timeout = timeout;
        group_of(node, 0, ranks_[node].front(), impatient);
    }
    /// Does what the launcher does when a rank is lost.
    void end_generation(int because_of_rank) {
        for (const ddprun::UniqueFd& segment : segments_)
            map_of(segment)->header().aborted.store(static_cast<std::uint32_t>(because_of_rank) + 1);
    }

  private:
    static std::shared_ptr<SegmentMap> map_of(const ddprun::UniqueFd& segment) {
        return std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(segment.get(), F_DUPFD_CLOEXEC, 0)));
    }
    static Ranks one_after_the_other(const std::vector<int>& numbers) {
        Ranks ranks;
        int next = 0;
        for (const int number : numbers) {
            for (ranks.emplace_back(); static_cast<int>(ranks.back().size()) < number;)
                ranks.back().push_back(next++);
        }
        return ranks;
    }
    std::unique_ptr<ProcessGroup> group_of(std::size_t node, std::size_t local, int rank,
                                           const ProcessGroupOptions& options) {
        ddprun::WorkerEnv env = environment_of(rank, size_);
        env.local_rank = static_cast<int>(local);
        env.local_world_size = static_cast<int>(ranks_[node].size());
        net::Parts parts{.bootstrap = bootstrap(), .group = 0, .open_link = open_link_};
        return cpu::make_group(
            std::make_unique<net::AcrossNodes>(map_of(segments_[node]), env, options.timeout, parts), env,
            options);
    }
    BootstrapStore bootstrap() {
        BootstrapStore bootstrap;
        bootstrap.put = [this](const std::string& key, const std::string& value) {
            const std::lock_guard lock(mutex_);
            values_[key] = value;
            changed_.notify_all();
        };
        bootstrap.get = [this](const std::string& key, ddprun::TimePoint until) -> std::string {
            std::unique_lock lock(mutex_);
            const bool there = changed_.wait_until(lock, until, [&] { return values_.contains(key); });
            return there ? values_[key] : "";
        };
        bootstrap.erase = [this](const std::string& key) {
            const std::lock_guard lock(mutex_);
            values_.erase(key);
        };
        return bootstrap;
    }

    Ranks ranks_;
    ProcessGroupOptions options_;
    int size_ = 0;
    std::function<std::unique_ptr<net::Link>()> open_link_ = [] {
        return net::open_fabric_link("127.0.0.1");
    };
    bool ends_generation_ = false;
    std::vector<ddprun::UniqueFd> segments_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, std::string> values_;
};

}  // namespace ddp::testing
