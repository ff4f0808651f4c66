#include <gtest/gtest.h>

#include "tests/rendezvous/server_fixture.h"
#include "tests/support/run_program.h"

namespace ddprun::rdzv {
namespace {

TEST(ProtocolDocument, IsEnoughToWriteAClientOfTheStore) {
    RunningServer server;
    server.with([](Server& s) { s.begin_generation(7); });
    const test::Outcome outcome = test::run({"python3", STORE_CLIENT, to_string(server.endpoint()), kTestJob.job_id, kTestJob.token, "7"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "the document is right\n");
}

}  // namespace
}  // namespace ddprun::rdzv
