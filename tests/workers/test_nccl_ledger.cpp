#include <gtest/gtest.h>

#include "ddp/nccl/ledger.h"

namespace {

using namespace ddp;
using ddprun::TimePoint;
using std::chrono::seconds;

TEST(NcclLedger, CountsOverlappingCollectivesOnce) {
    nccl::SessionParts parts;
    parts.lines = nccl::SessionParts::Lines::Private;
    nccl::Ledger ledger(parts);
    const auto at = [](int second) { return TimePoint{seconds(1000 + second)}; };
    const Call first{.seq = 1, .operation = ddprun::SegmentOp::AllReduce};
    const Call message{.seq = 1, .root = 1, .operation = ddprun::SegmentOp::Send};
    const Call second{.seq = 2, .operation = ddprun::SegmentOp::AllReduce};

    ledger.begin(first, at(0));
    ledger.begin(message, at(1));
    ledger.begin(second, at(2));
    ledger.end(first, at(0), at(10));
    EXPECT_EQ(ledger.communication_seconds(), 10);
    ledger.end(message, at(1), at(10));
    ledger.end(second, at(2), at(11));
    EXPECT_EQ(ledger.communication_seconds(), 11) << "communication cannot take more than a rank's time";

    ledger.begin(second, at(20));
    ledger.end(second, at(20), at(21));
    EXPECT_EQ(ledger.communication_seconds(), 12);
}

}  // namespace
