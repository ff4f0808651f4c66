#pragma once

#include <gtest/gtest.h>

#include <numeric>

#include "failures.h"
#include "several_nodes.h"

/// Tests of claims that hold on one node and across two.
namespace ddp::testing {

/// A world with as many ranks as the nodes have together. Worlds of several nodes are skipped without
/// libfabric.
class OnNodes : public ::testing::TestWithParam<std::vector<int>> {
  protected:
    void SetUp() override {
        if (GetParam().size() == 1) return;
        static const std::string why_not = [] {
            try {
                net::open_fabric_link("127.0.0.1");
            } catch (const InvalidInput& error) {
                return std::string(error.what());
            }
            return std::string();
        }();
        if (!why_not.empty()) GTEST_SKIP() << why_not;
    }
    static int ranks() { return std::accumulate(GetParam().begin(), GetParam().end(), 0); }
    /// Every rank's exception, by rank; null for none. The generation does not end.
    static std::vector<std::exception_ptr> failures(
        const std::function<void(ProcessGroup&)>& fn,
        std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
        if (GetParam().size() == 1) return failures_of_ranks(ranks(), fn, {.group = {.timeout = timeout}});
        return SeveralNodes(GetParam(), timeout).failures(fn);
    }
    /// Throws the first exception of a rank.
    static void run(const std::function<void(ProcessGroup&)>& fn) {
        GetParam().size() == 1 ? run_ranks(ranks(), fn) : SeveralNodes(GetParam()).run(fn);
    }
};

inline std::string name_of_nodes(const ::testing::TestParamInfo<std::vector<int>>& nodes) {
    return nodes.param.size() == 1 ? "OneNode" : "TwoNodes";
}
/// Three ranks: on one node, or two and one.
inline auto three_ranks() { return ::testing::Values(std::vector<int>{3}, std::vector<int>{2, 1}); }

}  // namespace ddp::testing
