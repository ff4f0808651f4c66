#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "env/json.h"
#include "env/text.h"
#include "tests/rendezvous/any_message.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

Frame frame_of(const std::string& bytes) {
    FrameDecoder decoder(kPeerLimits);
    decoder.feed(bytes);
    return **decoder.next();
}

Frame frame_of(const Message& message) { return frame_of(*encode(message, 7)); }

StoreRequest request(StoreOp op, std::optional<Duration> timeout = std::nullopt) {
    return {3, timeout, std::move(op)};
}

std::vector<Message> one_of_each() {
    return {
        Unknown{200},
        Hello{Role::Tool, "ddprun ps", "job 7", "00ff"},
        Challenge{"0123"},
        Proof{"abcd"},
        Welcome{"ef01"},
        Failure{Errc::StaleGeneration, "generation 2 is over"},
        Heartbeat{},
        request(store_op::Set{"k", Blob(std::string("\0\n\xff", 3))}),
        request(store_op::Get{"key with \"quotes\" and \xc3\xa4"}, 5s),
        request(store_op::TryGet{"k"}),
        request(store_op::Add{"k", -5}),
        request(store_op::CompareSet{"k", std::nullopt, Blob("desired")}),
        request(store_op::CompareSet{"k", "", Blob("desired")}),
        request(store_op::CompareSet{"k", "expected", Blob("desired")}),
        request(store_op::Erase{"k"}),
        request(store_op::Wait{{"a", "b"}}, 0s),
        request(store_op::Barrier{"b", 4}, 1ns),
        StoreRequest{3, 1s, store_op::Get{"k"}, 17, 2ms},
        ClientGone{UINT64_MAX},
        Done{},
        Value{Blob("bytes")},
        Absent{},
        Sum{INT64_MIN},
        Exchanged{true, Blob("now")},
        Erased{true},
        AgentHello{"node02",
                   1,
                   4,
                   4171,
                   "0.1.0",
                   {"10.0.0.2", "fe80::1"},
                   {"a=1"},
                   "trainer",
                   "slingshot",
                   {"CPUs 0-3", "CPUs 4-7"},
                   "1f",
                   2,
                   7,
                   1},
        AgentHello{"node02", std::nullopt, 4, 4171, "0.1.0", {}, {}, "default"},
        WorkersStarted{UINT64_MAX},
        WorkerExited{3,
                     1,
                     5,
                     4171,
                     true,
                     9,
                     true,
                     false,
                     812'000'000'000,
                     "",
                     {"line 1", "line 2"},
                     "{}",
                     "out of memory",
                     "#812",
                     640,
                     true,
                     200'000'000,
                     41'000'000'000},
        GenerationEnded{3, {"process 1 could not be killed"}},
        StartGeneration{3, 1, 2, 4, 8, 4, 4, 8, "node00", 29500, 1, false, 0, true, 5, 2, 180'000'000'000},
        StopGeneration{3, 15, 5'000'000'000, 5, "rank 5 died"},
        StopGeneration{3, 0, 5'000'000'000, -1, "ddprun drain", 812},
        Shutdown{75, "preempted"},
        Question{7, R"({"request":"status"})"},
        Answer{UINT64_MAX, Blob("{\"ok\":true}\n")},
        World{3, "c0ffee", Blob("node00 4\nnode01 4\n")},
        FenceEntered{3, "0-7", Blob(std::string("a\0b", 3))},
        FenceOver{3, "0-7", "", Blob("ab")},
        FenceOver{3, "0-7", "rank 5 has ended", {}},
        ModexRequest{3, 9, 5},
        ModexReply{3, 9, true, Blob("card")},
        JobSnapshot{3, 1, {"812000000000"}, 0, 2000000000, 5, 812, 4, "ab12", 8, 3, 41'000'000'000},
        StandbyListens{40123},
        Successor{"node01", {"10.0.0.2", "fd00::2"}, 40123},
        JobMoved{"node01", {"10.0.0.2", "fd00::2"}, 40123, "ab12"},
        OutputPiece{2, Blob("[4]: half a li")},
        OutputShown{262144},
        StepsDone{3, 812, true, 811},
        StopProposal{3, 812, "ddprun drain"},
        WorkerScalars{3, Blob("300 1700000000.5 0.25 loss\n")},
        WorkersReady{3, WorkerStage::Refused, "rank 3: backend mpi", 812},
        Release{3},
        SuspendGeneration{3, 5, "node02 is lost"},
        StopRequest{2, true},
        RehearsalRequest{3},
        Remark{"what started this ddprun has ended"},
        Waiting{"for 2 more nodes"},
        ForwardSignal{10},
        EndCollectives{5},
        EndJoining{5},
        KillRank{5, "it has not called all_reduce #812"},
        Preempt{"walltime"},
    };
}

TEST(Message, IsDecodedAsItWasEncoded) {
    for (const Message& message : one_of_each()) {
        const Result<Message> back = decode(frame_of(message));
        ASSERT_TRUE(back) << message_name(message) << ": " << back.error().what;
        EXPECT_EQ(*back, message) << message_name(message);
    }
}

TEST(Message, HasAUniqueType) {
    std::set<std::uint8_t> types;
    std::set<std::string_view> names;
    for (const Message& message : one_of_each()) {
        types.insert(frame_of(message).type);
        names.insert(message_name(message));
    }
    EXPECT_EQ(types.size(), names.size());
}

TEST(Message, KeepsTheNumbersOfReleasedVersions) {
    std::vector<int> types;
    for (const Message& message : one_of_each()) types.push_back(frame_of(message).type);
    types.erase(std::unique(types.begin(), types.end()), types.end());
    EXPECT_EQ(types, (std::vector<int>{200, 1,  2,  3,  4,  5,  6,   16, 17, 18, 19, 20, 21, 22, 23,
                                       17,  24, 32, 33, 34, 35, 36,  37, 64, 65, 66, 67, 80, 81, 82,
                                       97,  98, 83, 68, 84, 99, 100, 85, 69, 86, 70, 71, 87, 72, 88,
                                       73,  74, 89, 90, 75, 76, 77,  91, 92, 93, 94, 95, 101}));
}

TEST(Message, KeepsTheBytesOfReleasedVersions) {
    const auto json_of = [](const Message& message) { return frame_of(message).json; };
    EXPECT_EQ(json_of(Failure{Errc::Limit, "too much"}), R"({"code":"limit","what":"too much"})");
    EXPECT_EQ(json_of(request(store_op::CompareSet{"k", "12", Blob("34")}, 1s)),
              R"({"generation":3,"timeout_ns":1000000000,"key":"k","expected_bytes":2})");
    EXPECT_EQ(json_of(StoreRequest{3, 1s, store_op::Get{"k"}, 17, 2ms}),
              R"({"generation":3,"timeout_ns":1000000000,"client":17,"waited_ns":2000000,"key":"k"})");
    EXPECT_EQ(json_of(request(store_op::Wait{{"a\n", "b"}})), R"({"generation":3,"keys":["a\n","b"]})");
    EXPECT_EQ(
        json_of(AgentHello{"h", std::nullopt, 4, 71, "0.1.0", {"10.0.0.2"}, {"a=1"}, "default"}),
        R"({"addresses":["10.0.0.2"],"host":"h","pid":71,"role":"default","slots":4,"terms":["a=1"],"version":"0.1.0"})");
    WorkerExited exited{};
    exited.rank = 5;
    exited.meaning = "caf\xe9";
    EXPECT_EQ(
        json_of(exited),
        "{\"after_start_ns\":0,\"generation\":0,\"local_rank\":0,\"meaning\":\"caf\xef\xbf\xbd\",\"pid\":0,"
        "\"rank\":5,\"status\":0}");
    EXPECT_EQ(json_of(Heartbeat{}), "");
}

/// The rows of PROTOCOL.md about our messages, by number and name: "98 Answer".
std::map<std::string, std::string> rows_of_the_document() {
    std::map<std::string, std::string> rows;
    std::ifstream document(PROTOCOL_MD);
    bool has_messages = false;
    for (std::string line; std::getline(document, line);) {
        if (line.starts_with("## "))
            has_messages = line == "## Handshake" || line == "## Store" || line == "## Control messages";
        const std::vector<std::string_view> cells = split(line, '|');
        if (has_messages && cells.size() > 3 && parse_uint(trim(cells[1])))
            rows[fmt::format("{} {}", trim(cells[1]), trim(cells[2]))] = line;
    }
    return rows;
}

TEST(Message, HasARowWithItsMembersInTheDocument) {
    const std::map<std::string, std::string> rows = rows_of_the_document();
    for (const Message& message : one_of_each()) {
        const Frame frame = frame_of(message);
        if (holds_alternative<Unknown>(message)) continue;
        const auto row = rows.find(fmt::format("{} {}", frame.type, message_name(message)));
        ASSERT_NE(row, rows.end()) << message_name(message);
        const Json json =
            frame.json.empty() ? Json::object() : parse_json_object(frame.json).value_or(Json());
        for (const auto& [name, value] : members(json)) {
            const bool is_of_all = name == "generation" || name == "client" || name == "waited_ns";
            EXPECT_TRUE(is_of_all || row->second.find('`' + name + '`') != std::string::npos)
                << row->first << " lacks " << name;
        }
    }
}

TEST(Message, OfTheDocumentIsKnown) {
    for (const auto& [number_and_name, row] : rows_of_the_document()) {
        const auto type = static_cast<std::uint8_t>(std::stoi(number_and_name));
        EXPECT_EQ(fmt::format("{} {}", type, message_name(type)), number_and_name);
    }
}

TEST(Message, IgnoresUnknownKeys) {
    Frame frame = frame_of(Message(Sum{4}));
    frame.json = R"({"sum":4,"of":"a later version"})";
    EXPECT_EQ(*decode(frame), Message(Sum{4}));
}

TEST(Message, AcceptsAnAgentWithoutRoles) {
    Frame frame = frame_of(Message(AgentHello{"h", 0, 1, 2, "v", {}, {}, "trainer"}));
    frame.json.replace(frame.json.find(R"("role":"trainer",)"), 17, "");
    EXPECT_EQ(get<AgentHello>(*decode(frame)).role, "default");
}

struct Malformed {
    const char* json;
    const char* says;
};

TEST(Message, NamesTheKeyThatIsMalformed) {
    const Frame good = frame_of(Message(request(store_op::Add{"k", 1})));
    for (const auto& [json, says] : std::initializer_list<Malformed>{
             {R"({"generation":1,"delta":1})", "Add: 'key' is missing"},
             {R"({"generation":1,"key":7,"delta":1})", "'key' is number, expected text"},
             {R"({"generation":-1,"key":"k","delta":1})", "'generation' is out of range"},
             {R"({"generation":1,"key":"k","delta":1.5})", "'delta' is number, expected a whole number"},
             {R"({"generation":1,"key":"k","delta":9223372036854775808})", "'delta' is out of range"},
             {R"({"generation":1,"key":"k","delta":true})", "'delta' is boolean"},
             {R"({"generation":1,"timeout_ns":-5,"key":"k","delta":1})", "'timeout_ns' is negative"},
             {R"([1])", "not a JSON object"},
             {R"({"generation":)", "not valid JSON"},
             {"{\"generation\":1,\"key\":\"\xff\",\"delta\":1}", "not valid JSON"},
         }) {
        Frame frame = good;
        frame.json = json;
        const Result<Message> message = decode(frame);
        ASSERT_FALSE(message) << json;
        EXPECT_EQ(message.error().code, Errc::Protocol);
        EXPECT_NE(message.error().what.find(says), std::string::npos) << message.error().what;
    }
}

TEST(Message, RefusesABlobWhereThereIsNone) {
    Frame frame = frame_of(Message(request(store_op::Get{"k"})));
    frame.blob = "surprise";
    EXPECT_EQ(decode(frame).error().what, "Get: carries a blob, but has none");
}

TEST(Message, RefusesAnExpectedPartBeyondTheBlob) {
    Frame frame = frame_of(Message(request(store_op::CompareSet{"k", "12", Blob("34")})));
    frame.blob = "1";
    EXPECT_EQ(decode(frame).error().code, Errc::Protocol);
}

TEST(Message, RefusesAnUnknownRole) {
    Frame frame = frame_of(Message(Hello{}));
    frame.json = R"({"role":"boss","name":"","job_id":"","nonce":""})";
    EXPECT_EQ(decode(frame).error().what, "Hello: 'role' is 'boss'");
}

TEST(Message, KeepsAFailureWithACodeOfALaterVersion) {
    Frame frame = frame_of(Message(Failure{}));
    frame.json = R"({"code":"out_of_cheese","what":"no cheese"})";
    EXPECT_EQ(get<Failure>(*decode(frame)).what, "no cheese");
}

TEST(Message, SendsStderrThatIsNotUtf8WithReplacements) {
    WorkerExited exited{};
    exited.last_stderr = {"caf\xe9"};
    const Result<Message> back = decode(frame_of(Message(exited)));
    ASSERT_TRUE(back);
    EXPECT_EQ(get<WorkerExited>(*back).last_stderr, std::vector<std::string>{"caf\xef\xbf\xbd"});
}

TEST(Message, StaysWithinTheLimitsForAnyOutputOfAWorker) {
    WorkerExited exited{};
    exited.last_stderr.assign(100, std::string(100'000, '\x01'));  // each takes six bytes in JSON
    exited.last_stderr.back() = "the last line";
    for (std::string* text :
         {&exited.exec_failure, &exited.error_file, &exited.meaning, &exited.last_collective}) {
        text->assign(200'000, '\x01');
    }
    const Result<std::string> bytes = encode(exited, 0);
    ASSERT_TRUE(bytes) << bytes.error().what;
    const auto back = get<WorkerExited>(*decode(frame_of(*bytes)));
    EXPECT_EQ(back.last_stderr.size(), kReportLines);
    EXPECT_EQ(back.last_stderr.back(), "the last line");
}

TEST(Message, RefusesToEncodeMessagesThatAPeerWouldRefuse) {
    const Message huge = request(store_op::Set{"k", Blob(std::string(kPeerLimits.blob_bytes + 1UL, 'x'))});
    const Result<std::string> bytes = encode(huge, 1);
    ASSERT_FALSE(bytes);
    EXPECT_EQ(bytes.error().code, Errc::Limit);
}

TEST(Message, TheOrderToStartDoesNotGrowWithTheJob) {
    StartGeneration start{};
    start.master_addr = "node00000";
    const std::size_t of_one_node = encode(start, 0)->size();
    start.world_size = 131072;
    start.group_world_size = 16384;
    start.local_world_size = 8;
    EXPECT_LT(encode(start, 0)->size(), of_one_node + 16) << "a few digits more";
}

TEST(CheckKey, AcceptsUtf8Only) {
    EXPECT_TRUE(check_key("nccl/3/0 \xe2\x82\xac \xf0\x9f\x98\x80"));
    for (const char* bad : {"", "\xff", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80",
                            "\xf4\x90\x80\x80", "\xf0\x80\x80\x80", "a\x80"}) {
        EXPECT_FALSE(check_key(bad)) << bad;
    }
    EXPECT_TRUE(check_key(std::string(1024, 'k')));
    EXPECT_FALSE(check_key(std::string(1025, 'k')));
}

}  // namespace
}  // namespace ddprun::rdzv
