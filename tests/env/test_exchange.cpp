#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "env/nodes/exchange.h"
#include "env/nodes/meeting_point.h"
#include "env/nodes/pmix_source.h"
#include "env/unique_fd.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = ExchangeChoice::Kind;
using Known = std::map<std::string, std::string, std::less<>>;

EnvironmentLookup known(Known variables) {
    return [variables = std::move(variables)](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

LauncherChoice chosen(LauncherFamily family, bool has_pmix, std::string job = "7") {
    LauncherChoice choice;
    choice.placement =
        Placement{family, 0, 2, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::move(job)};
    choice.has_pmix = has_pmix;
    return choice;
}

TimePoint soon() { return MonotonicClock::now() + std::chrono::seconds(20); }
TimePoint at_once() { return MonotonicClock::now() + std::chrono::milliseconds(50); }

// ---- the choice of a channel

TEST(ExchangeChoice, TakesPmiUnderHydraEvenInsideOpenMpi) {
    const auto choice = choose_exchange(chosen(LauncherFamily::Pmi, true), known({{"PMI_FD", "6"}}));
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->kind, Kind::Pmi);
    EXPECT_EQ(choice->pmi_fd, 6);
}

TEST(ExchangeChoice, TakesPmixUnderItsServer) {
    if (!built_with_pmix()) GTEST_SKIP() << "built without PMIx";
    const auto choice = choose_exchange(chosen(LauncherFamily::OpenMpi, true), known({{"PMI_FD", "6"}}));
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->kind, Kind::Pmix);
}

TEST(ExchangeChoice, TakesAFileOnlyWithADirectoryAndAJobId) {
    const LauncherChoice slurm = chosen(LauncherFamily::Slurm, false);
    EXPECT_EQ(choose_exchange(slurm, known({}))->kind, Kind::None);
    EXPECT_EQ(choose_exchange(slurm, known({{"DDPRUN_EXCHANGE_DIR", "/shared"}}))->kind, Kind::File);
    const LauncherChoice nameless = chosen(LauncherFamily::Mvapich, false, "");
    const auto none = choose_exchange(nameless, known({{"DDPRUN_EXCHANGE_DIR", "/shared"}}));
    EXPECT_EQ(none->kind, Kind::None);
    EXPECT_THAT(none->why, HasSubstr("no job id that would keep two jobs apart in DDPRUN_EXCHANGE_DIR"));
}

TEST(ExchangeChoice, NamesABuildWithoutPmixWhenTheLauncherHasAServer) {
    EXPECT_THAT(nothing_offered(MissedPmix::NotBuilt, true, false),
                AllOf(HasSubstr("this build has no PMIx (libpmix-dev was missing"),
                      HasSubstr("no DDPRUN_EXCHANGE_DIR")));
    EXPECT_EQ(nothing_offered(MissedPmix::NotOffered, true, false),
              "neither PMIx nor PMI_FD, and no DDPRUN_EXCHANGE_DIR");
}

TEST(ExchangeChoice, TakesAFileInTheGivenDirectoryAsTheLastResort) {
    const LauncherChoice slurm = chosen(LauncherFamily::Slurm, false);
    const ExchangeChoice file = or_file_in(*choose_exchange(slurm, known({})), slurm, known({}), "/work");
    EXPECT_EQ(file.kind, Kind::File);
    EXPECT_EQ(file.directory, "/work");
    const Known forbidden{{"DDPRUN_EXCHANGE", "none"}};
    EXPECT_EQ(or_file_in(*choose_exchange(slurm, known(forbidden)), slurm, known(forbidden), "/work").kind,
              Kind::None);
}

TEST(ExchangeChoice, LeavesTheLaunchersChannelsToAnMpiProgram) {
    const auto choice =
        choose_exchange(chosen(LauncherFamily::Pmi, false), known({{"PMI_FD", "6"}}), ExchangeUse::OnlyFiles);
    EXPECT_EQ(choice->kind, Kind::None);
}

TEST(ExchangeChoice, RefusesAnImpossibleWishWithTheReason) {
    const auto wish = [](const char* what) {
        return choose_exchange(chosen(LauncherFamily::Slurm, false), known({{"DDPRUN_EXCHANGE", what}}));
    };
    EXPECT_THAT(wish("pmi").error().what, AllOf(HasSubstr("DDPRUN_EXCHANGE=pmi"), HasSubstr("PMI_FD")));
    EXPECT_THAT(wish("pmix").error().what, HasSubstr("DDPRUN_EXCHANGE=pmix"));
    EXPECT_THAT(wish("file").error().what, HasSubstr("DDPRUN_EXCHANGE_DIR"));
    EXPECT_THAT(wish("pigeons").error().what, HasSubstr("expected pmix, pmi, file or none"));
}

// ---- PMI-1 against a fake server

/// The launcher's end of a PMI descriptor, used by the test.
class FakePmi {
  public:
    FakePmi() {
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
            throw std::runtime_error("socketpair");
        ours_.reset(ends[0]);
        theirs_.reset(ends[1]);
    }
    ~FakePmi() {
        close();
        if (thread_.joinable()) thread_.join();
    }
    [[nodiscard]] int descriptor() const { return theirs_.get(); }
    /// Shows the client and our own thread the end of the stream.
    void close() const { ::shutdown(ours_.get(), SHUT_RDWR); }
    void say(const std::string& text) const {
        static_cast<void>(::send(ours_.get(), text.data(), text.size(), MSG_NOSIGNAL));
    }
    /// Reads the next line; "" at the end.
    std::string hear() {
        std::string line;
        char c = 0;
        while (::read(ours_.get(), &c, 1) == 1 && c != '\n') line += c;
        return line;
    }
    void run(std::function<void(FakePmi&)> serve) {
        thread_ = std::thread([this, serve = std::move(serve)] { serve(*this); });
    }
    /// Waits until the client has closed.
    void join() { thread_.join(); }

  private:
    UniqueFd ours_, theirs_;
    std::thread thread_;
};

/// Answers as Hydra does to a single process.
void serve_as_hydra(FakePmi& pmi, std::vector<std::string>& heard) {
    std::map<std::string, std::string> space;
    for (std::string line = pmi.hear(); !line.empty(); line = pmi.hear()) {
        heard.push_back(line);
        const std::string command = line.substr(0, line.find(' '));
        const auto field = [&](const std::string& name) {
            const std::size_t at = line.find(' ' + name + '=') + name.size() + 2;
            return line.substr(at, line.find(' ', at) - at);
        };
        if (command == "cmd=init") pmi.say("cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n");
        if (command == "cmd=get_my_kvsname") pmi.say("cmd=my_kvsname kvsname=kvs_12_0_1\n");
        if (command == "cmd=put") {
            space[field("key")] = field("value");
            pmi.say("cmd=put_result rc=0 msg=success\n");
        }
        if (command == "cmd=barrier_in") pmi.say("cmd=barrier_out\n");
        if (command == "cmd=get") {
            const auto found = space.find(field("key"));
            if (found == space.end()) pmi.say("cmd=get_result rc=-1 msg=key_not_found value=unknown\n");
            else pmi.say("cmd=get_result rc=0 msg=success value=" + found->second + "\n");
        }
        if (command == "cmd=finalize") {
            pmi.say("cmd=finalize_ack\n");
            return;
        }
    }
}

TEST(PmiExchange, CarriesAWordAndSendsFinalize) {
    FakePmi pmi;
    std::vector<std::string> heard;
    pmi.run([&](FakePmi& server) { serve_as_hydra(server, heard); });
    {
        auto exchange = open_pmi_exchange(pmi.descriptor(), 3, soon());
        ASSERT_TRUE(exchange) << exchange.error().what;
        ASSERT_TRUE((*exchange)->put("meeting", "1/29400/ab/cd/10.0.0.1,"));
        ASSERT_TRUE((*exchange)->fence());
        EXPECT_EQ((*exchange)->get(3, "meeting").value_or(""), "1/29400/ab/cd/10.0.0.1,");
        const auto absent = (*exchange)->get(1, "meeting");
        ASSERT_FALSE(absent);
        EXPECT_EQ(absent.error().code, Errc::NotFound);
        EXPECT_THAT(absent.error().what, AllOf(HasSubstr("PMI on descriptor"), HasSubstr("rank 1")));
    }
    pmi.join();
    EXPECT_EQ(heard.back(), "cmd=finalize");
    EXPECT_THAT(heard, ::testing::Contains(
                           "cmd=put kvsname=kvs_12_0_1 key=ddprun-3-meeting value=1/29400/ab/cd/10.0.0.1,"));
}

TEST(PmiExchange, AnswersThatArriveInPiecesAreJoined) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        for (const char c : std::string("cmd=response_to_init rc=0\n")) server.say(std::string(1, c));
        server.hear();
        server.say("cmd=my_kvsname kvsn");
        server.say("ame=k\ncmd=fina");
        server.hear();
        server.say("lize_ack\n");
    });
    EXPECT_TRUE(open_pmi_exchange(pmi.descriptor(), 0, soon()));
}

TEST(PmiExchange, GarbageIsAnErrorThatShowsItAndEndsTheConversation) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        server.say("SSH-2.0-OpenSSH\n");
    });
    const auto exchange = open_pmi_exchange(pmi.descriptor(), 0, soon());
    ASSERT_FALSE(exchange);
    EXPECT_EQ(exchange.error().code, Errc::Protocol);
    EXPECT_THAT(exchange.error().what,
                AllOf(HasSubstr("SSH-2.0"), HasSubstr("response_to_init"), HasSubstr("PMI on descriptor")));
}

TEST(PmiExchange, ALineWithoutAnEndIsAnError) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        server.say(std::string(10'000, 'x'));
    });
    const auto exchange = open_pmi_exchange(pmi.descriptor(), 0, soon());
    ASSERT_FALSE(exchange);
    EXPECT_EQ(exchange.error().code, Errc::Protocol);
}

TEST(PmiExchange, ALauncherThatClosesInMidConversationIsNoticedAtOnce) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        server.say("cmd=response_to_init rc=0\n");
        server.hear();
        server.say("cmd=my_kvsname kvsname=k\n");
        server.hear();  // barrier_in
        server.close();
    });
    auto exchange = open_pmi_exchange(pmi.descriptor(), 0, MonotonicClock::now() + std::chrono::hours(1));
    ASSERT_TRUE(exchange) << exchange.error().what;
    const Status fenced = (*exchange)->fence();
    ASSERT_FALSE(fenced);
    EXPECT_EQ(fenced.error().code, Errc::Closed);
    EXPECT_THAT(fenced.error().what, HasSubstr("barrier_out"));
    EXPECT_EQ((*exchange)->fence().error().code, Errc::Closed);
}

TEST(PmiExchange, AFenceThatAPeerDoesNotEnterEndsAtTheDeadline) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        server.say("cmd=response_to_init rc=0\n");
        server.hear();
        server.say("cmd=my_kvsname kvsname=k\n");
        while (!server.hear().empty()) {
        }
    });
    auto exchange =
        open_pmi_exchange(pmi.descriptor(), 0, MonotonicClock::now() + std::chrono::milliseconds(500));
    ASSERT_TRUE(exchange) << exchange.error().what;
    const Status fenced = (*exchange)->fence();
    ASSERT_FALSE(fenced);
    EXPECT_EQ(fenced.error().code, Errc::Timeout);
    EXPECT_THAT(fenced.error().what, HasSubstr("did all processes"));
    exchange->reset();  // sends nothing on a broken stream
    pmi.close();
}

TEST(PmiExchange, ARefusalHasTheLaunchersMessage) {
    FakePmi pmi;
    pmi.run([](FakePmi& server) {
        server.hear();
        server.say("cmd=response_to_init rc=-1 msg=version_mismatch\n");
    });
    const auto exchange = open_pmi_exchange(pmi.descriptor(), 0, soon());
    ASSERT_FALSE(exchange);
    EXPECT_THAT(exchange.error().what, AllOf(HasSubstr("rc=-1"), HasSubstr("version_mismatch")));
}

TEST(PmiExchange, ADescriptorThatIsNoSocketIsAnError) {
    const auto exchange = open_pmi_exchange(1 << 19, 0, soon());
    ASSERT_FALSE(exchange);
    EXPECT_THAT(exchange.error().what, HasSubstr("PMI on descriptor 524288"));
}

TEST(PmiExchange, RejectsKeysWithBlanks) {
    FakePmi pmi;
    std::vector<std::string> heard;
    pmi.run([&](FakePmi& server) { serve_as_hydra(server, heard); });
    {
        auto exchange = open_pmi_exchange(pmi.descriptor(), 0, soon());
        ASSERT_TRUE(exchange);
        EXPECT_EQ((*exchange)->put("key", "two words").error().code, Errc::InvalidArgument);
        EXPECT_EQ((*exchange)->put("key", "a\ncmd=abort").error().code, Errc::InvalidArgument);
        EXPECT_EQ((*exchange)->put("key", "").error().code, Errc::InvalidArgument);
        EXPECT_EQ((*exchange)->put("key", std::string(kMaxExchangeValue + 1, 'x')).error().code,
                  Errc::InvalidArgument);
    }
    pmi.join();
    EXPECT_THAT(heard, Not(::testing::Contains(HasSubstr("cmd=put"))));
}

// ---- files

class FileExchanges : public ::testing::Test {
  protected:
    FileExchange of_rank(int rank, int size = 2) { return {directory_.path(), "slurm-7.0", rank, size, 0}; }
    std::string path_of(int rank) { return directory_.path() + "/.ddprun-slurm-7.0." + std::to_string(rank); }
    void write(int rank, const std::string& content) { std::ofstream(path_of(rank)) << content; }
    test::TemporaryDirectory directory_;
};

TEST_F(FileExchanges, AValueReachesAProcessThatAskedEarlier) {
    std::string heard;
    std::thread other([&] {
        auto exchange = open_file_exchange(of_rank(1), soon());
        if (exchange && (*exchange)->fence()) heard = (*exchange)->get(0, "meeting").value_or("nothing");
    });
    auto exchange = open_file_exchange(of_rank(0), soon());
    ASSERT_TRUE(exchange);
    ASSERT_TRUE((*exchange)->put("meeting", "here"));
    ASSERT_TRUE((*exchange)->fence());
    other.join();
    EXPECT_EQ(heard, "here");
    struct stat status {};
    ASSERT_EQ(::stat(path_of(0).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600u);
    exchange->reset();
    EXPECT_NE(::stat(path_of(0).c_str(), &status), 0) << "the file is left behind";
}

TEST_F(FileExchanges, FilesOfAnEarlierRunOfTheJobAreIgnored) {
    write(0, "ddprun exchange 1\n2 1000\nmeeting old\n");
    FileExchange mine = of_rank(1);
    mine.began = 100'000;
    auto exchange = open_file_exchange(mine, at_once());
    const auto heard = (*exchange)->get(0, "meeting");
    ASSERT_FALSE(heard);
    EXPECT_EQ(heard.error().code, Errc::Timeout);
    EXPECT_THAT(heard.error().what, HasSubstr("older than this job"));
}

TEST_F(FileExchanges, AFileOfAnotherUserIsRefused) {
    write(0, "ddprun exchange 1\n2 1000\nmeeting trap\n");
    if (::chown(path_of(0).c_str(), 12345, 12345) != 0) GTEST_SKIP() << "only root gives files away";
    auto exchange = open_file_exchange(of_rank(1), soon());
    const auto heard = (*exchange)->get(0, "meeting");
    ASSERT_FALSE(heard);
    EXPECT_EQ(heard.error().code, Errc::Refused);
    EXPECT_THAT(heard.error().what, HasSubstr("belongs to user 12345"));
}

TEST_F(FileExchanges, AFileThatNeverAppearsIsNamedWithTheRemedy) {
    auto exchange = open_file_exchange(of_rank(1), at_once());
    const auto heard = (*exchange)->get(0, "meeting");
    ASSERT_FALSE(heard);
    EXPECT_EQ(heard.error().code, Errc::Timeout);
    EXPECT_THAT(heard.error().what, AllOf(HasSubstr(path_of(0)), HasSubstr("DDPRUN_EXCHANGE_DIR")));
}

TEST_F(FileExchanges, FilesOfAJobOfAnotherSizeAreIgnored) {
    write(0, "ddprun exchange 1\n4 1000\nmeeting theirs\n");
    auto exchange = open_file_exchange(of_rank(1), at_once());
    EXPECT_THAT((*exchange)->get(0, "meeting").error().what, HasSubstr("of 4 processes, we are 2"));
}

TEST_F(FileExchanges, GarbageIsAnError) {
    for (const char* garbage : {"", "hello\n", "ddprun exchange 1\n2 x\n", "ddprun exchange 1\n2 5\nmeeting",
                                "ddprun exchange 1\n2 5\nword\n"}) {
        write(0, garbage);
        auto exchange = open_file_exchange(of_rank(1), soon());
        const auto heard = (*exchange)->get(0, "meeting");
        ASSERT_FALSE(heard) << garbage;
        EXPECT_EQ(heard.error().code, Errc::Protocol) << garbage;
    }
}

TEST_F(FileExchanges, ADirectoryThatDoesNotExistIsAnErrorAtOnce) {
    FileExchange nowhere = of_rank(0);
    nowhere.directory += "/absent";
    EXPECT_THAT(open_file_exchange(nowhere, soon()).error().what, HasSubstr("/absent: No such file"));
}

TEST(FileExchangeName, KeepsTwoJobsAndTwoRunsOfOneApart) {
    const Placement placement{LauncherFamily::Slurm, 1, 4, {}, {}, {}, {}, "7[2].0"};
    EXPECT_EQ(file_exchange_of("/d", placement, known({})).job, "slurm-7_2_.0");
    EXPECT_EQ(file_exchange_of("/d", placement, known({{"SLURM_RESTART_COUNT", "1"}})).job, "slurm-7_2_.0-1");
}

// ---- the meeting point

TEST(MeetingPoint, IsReadBackFromItsWord) {
    const MeetingPoint point{"run of 12[3].pbs", "0123456789abcdef", 29400, {"10.0.0.5", "fd00::5"}};
    EXPECT_TRUE(check_exchange_word(encode(point), kMaxExchangeValue));
    EXPECT_EQ(*decode_meeting_point(encode(point)), point);
}

TEST(MeetingPoint, LeavesOutAddressesForWhichThereIsNoRoom) {
    const MeetingPoint point{"job", "token", 1,
                             std::vector<std::string>(100, "fd00:1111:2222:3333:4444:5555:6666:7777")};
    const std::string word = encode(point);
    EXPECT_LE(word.size(), kMaxExchangeValue);
    EXPECT_GE(decode_meeting_point(word)->addresses.size(), 10u);
}

TEST(MeetingPoint, MalformedOnesAreRefusedWithoutShowingTheSecret) {
    for (const char* word : {"", "x", "2/29400/ab/cd/10.0.0.1", "1/0/ab/cd/10.0.0.1", "1/29400//cd/10.0.0.1",
                             "1/29400/ab/c/10.0.0.1", "1/29400/ab/cd/"}) {
        const auto point = decode_meeting_point(word);
        ASSERT_FALSE(point) << word;
        EXPECT_EQ(point.error().code, Errc::Protocol);
    }
    EXPECT_THAT(decode_meeting_point("1/99999/s3cret/cd/10.0.0.1").error().what, Not(HasSubstr("s3cret")));
}

const std::vector<InterfaceAddress> kTypical{
    {"lo", "127.0.0.1", true, true},   {"docker0", "172.17.0.1", false, true},
    {"eth0", "fe80::1", false, true},  {"eth0", "fd00::7", false, true},
    {"eth0", "10.1.0.7", false, true}, {"eth1", "10.9.0.7", false, false},
    {"ib0", "10.2.0.7", false, true},  {"eth2", "169.254.3.4", false, true}};

TEST(ReachableAddresses, AreThoseThatOthersCanUse) {
    EXPECT_THAT(reachable_addresses(kTypical, ""), ElementsAre("10.1.0.7", "10.2.0.7", "fd00::7"));
}

TEST(ReachableAddresses, FollowNcclsInterfaces) {
    EXPECT_THAT(reachable_addresses(kTypical, "ib"), ElementsAre("10.2.0.7", "10.1.0.7", "fd00::7"));
    EXPECT_THAT(reachable_addresses(kTypical, "=ib0,docker0"),
                ElementsAre("172.17.0.1", "10.2.0.7", "10.1.0.7", "fd00::7"));
    EXPECT_THAT(reachable_addresses(kTypical, "^eth,docker"), ElementsAre("10.2.0.7"));
}

TEST(ReachableAddresses, AreTheLoopbackOnAHostWithoutANetwork) {
    EXPECT_THAT(reachable_addresses({{"lo", "127.0.0.1", true, true}}, ""), ElementsAre("127.0.0.1"));
    EXPECT_THAT(reachable_addresses({}, ""), IsEmpty());
}

TEST(AddressOn, AnInterfaceANetworkOrAnAddressNamesOneAddressOfThisHost) {
    const std::vector<InterfaceAddress> all{
        {"lo", "127.0.0.1", true, true},   {"eth0", "fe80::1", false, true},
        {"eth0", "fd00::7", false, true},  {"eth0", "10.1.0.7", false, true},
        {"eth0", "10.1.0.8", false, true}, {"ib0", "fe80::2", false, true},
        {"ib0", "fd77::7", false, true},   {"ib1", "10.3.0.7", false, false}};
    EXPECT_EQ(*address_on("eth0", all), "10.1.0.7") << "of several the first IPv4 address";
    EXPECT_EQ(*address_on("ib0", all), "fd77::7")
        << "IPv6 where there is nothing else, and not what is valid on one link only";
    EXPECT_EQ(*address_on("10.1.0.8/31", all), "10.1.0.8");
    EXPECT_EQ(*address_on("10.1.0.8", all), "10.1.0.8");
    EXPECT_EQ(*address_on("fd00::/16", all), "fd00::7");
    EXPECT_EQ(*address_on("0.0.0.0/0", all), "127.0.0.1");
}

TEST(AddressOn, AMissingOrDownInterfaceIsAnErrorThatListsTheAddresses) {
    const std::vector<InterfaceAddress> all{{"eth0", "10.1.0.7", false, true},
                                            {"ib1", "10.3.0.7", false, false}};
    for (const char* iface : {"eth", "ib1", "10.2.0.0/16", "10.3.0.0/16", "::/0"}) {
        const Result<std::string> address = address_on(iface, all);
        ASSERT_FALSE(address) << iface;
        EXPECT_EQ(address.error().code, Errc::NotFound);
        EXPECT_THAT(address.error().what, ::testing::HasSubstr("eth0 10.1.0.7, ib1 10.3.0.7 (down)"));
    }
    for (const char* iface : {"10.1.0.0/33", "fd00::/129", "eth0/16", "10.1.0.0/"}) {
        EXPECT_EQ(address_on(iface, all).error().code, Errc::InvalidArgument) << iface;
    }
}

TEST(HostIdentity, IsAWord) { EXPECT_TRUE(check_exchange_word(host_identity(), kMaxExchangeValue)); }

TEST(PlaceByHosts, CountsRanksOnTheSameHostInAnyOrder) {
    Placement third;
    third.rank = 2;
    place_by_hosts(third, {"b", "a", "b", "a", "b"});
    EXPECT_EQ(third.local_rank, 1);
    EXPECT_EQ(third.local_size, 3);
    EXPECT_EQ(third.node_rank, 0);
    EXPECT_EQ(third.nodes, 2);
}

// ---- gather

/// A fake channel between two processes.
class SharedWords final : public Exchange {
  public:
    SharedWords(std::map<std::string, std::string>& words, int rank) : words_(words), rank_(rank) {}
    Status put(std::string_view key, std::string_view value) override {
        words_[std::to_string(rank_) + std::string(key)] = value;
        return {};
    }
    Status fence() override { return {}; }
    Result<std::string> get(int rank, std::string_view key) override {
        const auto found = words_.find(std::to_string(rank) + std::string(key));
        if (found == words_.end()) return Error{Errc::NotFound, "nothing", 0};
        return found->second;
    }

  private:
    std::map<std::string, std::string>& words_;
    int rank_;
};

TEST(Gather, GetsTheMeetingPointOfRankZeroAndLocalRanksByHosts) {
    std::map<std::string, std::string> words;
    const MeetingPoint point{"job", "token", 29400, {"10.0.0.5"}};
    Placement first, second;
    first.rank = 0;
    second.rank = 1;
    first.size = second.size = 2;
    SharedWords one(words, 0), other(words, 1);
    ASSERT_TRUE(other.put("host", host_identity()));
    const auto zero = gather(one, first, point, WhoIsWhere::Needed);
    const auto heard = gather(other, second, std::nullopt, WhoIsWhere::Needed);
    ASSERT_TRUE(zero && heard);
    EXPECT_EQ(heard->meeting, point);
    EXPECT_EQ(heard->placement.local_rank, 1);
    EXPECT_EQ(heard->placement.local_size, 2);
    EXPECT_EQ(heard->placement.nodes, 1);
}

TEST(Gather, PublishesNoHostWhenThePlaceIsKnownOrAProcessIsANode) {
    std::map<std::string, std::string> words;
    Placement placement;
    placement.rank = placement.local_rank = placement.node_rank = 0;
    placement.size = placement.nodes = 2;
    placement.local_size = 1;
    SharedWords exchange(words, 0);
    const MeetingPoint point{"job", "token", 1, {"10.0.0.5"}};
    ASSERT_TRUE(gather(exchange, placement, point, WhoIsWhere::Needed));
    placement.node_rank.reset();
    ASSERT_TRUE(gather(exchange, placement, point, WhoIsWhere::AsTold));
    EXPECT_EQ(words.count("0host"), 0u);
}

TEST(PlaceByHosts, KeepsTheLaunchersFacts) {
    Placement placement;
    placement.rank = 1;
    placement.local_rank = 0;
    placement.local_size = 1;
    place_by_hosts(placement, {"a", "a"});
    EXPECT_EQ(placement.local_rank, 0);
    EXPECT_EQ(placement.local_size, 1);
    EXPECT_EQ(placement.node_rank, 0);
}

}  // namespace
}  // namespace ddprun
