#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "tests/support/slurm_hosts.h"

namespace ddprun::test {

/// A suite over a real Slurm on several hosts, shared by its tests because it takes seconds to start.
/// `Fixture` is GoogleTest's (Test, TestWithParam).
template <int host_count, class Fixture = ::testing::Test>
class OnSlurm : public Fixture {
  protected:
    static void SetUpTestSuite() {
        if (SlurmHosts::why_not()) return;
        hosts_ = std::make_unique<Hosts>(host_count);
        slurm_ = std::make_unique<SlurmHosts>(*hosts_);
    }
    static void TearDownTestSuite() {
        slurm_.reset();
        hosts_.reset();
    }
    void SetUp() override {
        if (const auto reason = SlurmHosts::why_not()) GTEST_SKIP() << *reason;
    }

    inline static std::unique_ptr<Hosts> hosts_;
    inline static std::unique_ptr<SlurmHosts> slurm_;
};

}  // namespace ddprun::test
