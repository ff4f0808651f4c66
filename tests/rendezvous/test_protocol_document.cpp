#include <gtest/gtest.h>

#include "tests/rendezvous/server_fixture.h"
#include "tests/support/run_program.h"

namespace ddprun::rdzv {
namespace {

void try_client(RunningServer& server, const std::string& scheme) {
    server.with([](Server& s) { s.begin_generation(7); });
    const test::Outcome outcome = test::run({"python3", STORE_CLIENT, scheme + to_string(server.endpoint()),
                                             kTestJob.job_id, kTestJob.token, "7"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "the document is right\n");
}

TEST(ProtocolDocument, SufficesToWriteAStoreClient) {
    RunningServer server;
    try_client(server, "tcp:");
}

TEST(ProtocolDocument, SufficesToWriteATlsClient) {
    const Result<std::shared_ptr<const TlsContext>> tls = TlsContext::for_server();
    if (!tls) GTEST_SKIP() << tls.error().what;
    RunningServer server({}, {}, false, *tls);
    try_client(server, "tls:");
}

}  // namespace
}  // namespace ddprun::rdzv
