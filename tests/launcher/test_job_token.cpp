#include "launcher/start/job_token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Variables = std::map<std::string, std::string>;

EnvironmentLookup environment(Variables variables) {
    return [variables = std::move(variables)](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

/// A home directory and its files.
struct Home {
    test::TemporaryDirectory directory;
    [[nodiscard]] std::string secret() const { return directory.file(".config/ddprun/secret"); }
    [[nodiscard]] EnvironmentLookup variables(Variables more = {}) const {
        more.insert({"HOME", directory.path()});
        return environment(std::move(more));
    }
    [[nodiscard]] int files() const {
        const std::filesystem::recursive_directory_iterator all(directory.path());
        return static_cast<int>(
            std::count_if(begin(all), end(all), [](const auto& entry) { return entry.is_regular_file(); }));
    }
    void write_secret(const std::string& bytes, mode_t mode) const {
        std::filesystem::create_directories(directory.file(".config/ddprun"));
        std::ofstream(secret(), std::ios::binary) << bytes;
        ::chmod(secret().c_str(), mode);
    }
};

JobSpec two_nodes(const std::string& host = "node01", std::uint16_t port = 29400,
                  const std::string& id = "none") {
    JobSpec spec;
    spec.nodes = {2, 2};
    spec.rendezvous.endpoint = Endpoint{host, port};
    spec.rendezvous.run_id = id;
    return spec;
}

std::string token_of(const JobSpec& spec, const EnvironmentLookup& variables) {
    const Result<JobToken> token = choose_job_token(spec, variables);
    EXPECT_TRUE(token) << token.error().what;
    return token ? token->token : "";
}

std::string error_of(const JobSpec& spec, const EnvironmentLookup& variables) {
    const Result<JobToken> token = choose_job_token(spec, variables);
    EXPECT_FALSE(token);
    if (token) return "";
    EXPECT_EQ(token.error().code, Errc::InvalidArgument) << "exit code 64";
    return token.error().what;
}

// ---- the file

TEST(UserSecret, IsMadeAtFirstUseForItsOwnerAlone) {
    const Home home;
    const Result<UserSecret> first = user_secret(home.secret());
    ASSERT_TRUE(first) << first.error().what;
    EXPECT_TRUE(first->is_new);
    EXPECT_EQ(first->bytes.size(), 32U);
    struct stat status {};
    ASSERT_EQ(::stat(home.secret().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600U);
    ASSERT_EQ(::stat(home.directory.file(".config").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0077, 0U);
    EXPECT_EQ(home.files(), 1) << "nothing is left beside it";

    const Result<UserSecret> second = user_secret(home.secret());
    ASSERT_TRUE(second);
    EXPECT_FALSE(second->is_new);
    EXPECT_EQ(second->bytes, first->bytes);
}

TEST(UserSecret, TheFirstOfTwoSimultaneousSecretsIsUsedByBothNodes) {
    const Home home;
    // Both have found no file, and each has drawn a secret.
    const std::string one(32, 'a'), other(32, 'b');
    const Result<UserSecret> first = settle_user_secret(home.secret(), one),
                             second = settle_user_secret(home.secret(), other);
    ASSERT_TRUE(first && second);
    EXPECT_EQ(first->bytes, one);
    EXPECT_EQ(second->bytes, one);
    EXPECT_FALSE(second->is_new);
    EXPECT_EQ(home.files(), 1);
}

TEST(UserSecret, ThatOthersCanReadIsRefused) {
    for (const mode_t mode : {0640, 0604, 0620, 0602}) {
        const Home home;
        home.write_secret(std::string(32, 's'), mode);
        EXPECT_THAT(user_secret(home.secret()).error().what,
                    AllOf(HasSubstr(home.secret()), HasSubstr("by others"), HasSubstr("chmod 600")));
    }
}

TEST(UserSecret, InADirectoryThatOthersCanWriteToIsRefusedAndNoneIsMadeThere) {
    for (const mode_t mode : {0770, 0707, 0777, 01777}) {
        const Home home;
        home.write_secret(std::string(32, 's'), 0600);
        ASSERT_EQ(::chmod(home.directory.file(".config/ddprun").c_str(), mode), 0);
        const auto refusal =
            AllOf(HasSubstr(home.directory.file(".config/ddprun") + " can be written by others"),
                  HasSubstr("chmod 700"));
        EXPECT_THAT(user_secret(home.secret()).error().what, refusal);
        std::filesystem::remove(home.secret());
        EXPECT_THAT(user_secret(home.secret()).error().what, refusal);
        EXPECT_EQ(home.files(), 0);
    }
}

TEST(UserSecret, InADirectoryOfAnotherUserIsRefused) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
    const Home home;
    home.write_secret(std::string(32, 's'), 0600);
    ASSERT_EQ(::chown(home.directory.file(".config/ddprun").c_str(), 65534, 65534), 0);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("ddprun belongs to user 65534"));
}

TEST(UserSecret, ThatIsALinkToAnotherFileIsRefusedAndItsDirectoryMayBeALinkOfOurs) {
    const Home home;
    home.write_secret(std::string(32, 's'), 0600);
    std::filesystem::rename(home.secret(), home.directory.file("known_text"));
    std::filesystem::create_symlink(home.directory.file("known_text"), home.secret());
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("is a symbolic link"));
    std::filesystem::remove(home.secret());
    std::filesystem::rename(home.directory.file(".config/ddprun"), home.directory.file("dotfiles"));
    std::filesystem::create_symlink(home.directory.file("dotfiles"), home.directory.file(".config/ddprun"));
    EXPECT_TRUE(user_secret(home.secret()));
    if (::geteuid() != 0) return;
    ASSERT_EQ(::lchown(home.directory.file(".config/ddprun").c_str(), 65534, 65534), 0);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("belongs to user 65534"));
}

TEST(UserSecret, OfAnotherUserIsRefused) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
    const Home home;
    home.write_secret(std::string(32, 's'), 0600);
    ASSERT_EQ(::chown(home.secret().c_str(), 65534, 65534), 0);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("belongs to user 65534"));
}

TEST(UserSecret, ThatIsTooShortOrNoFileIsRefused) {
    const Home home;
    home.write_secret(std::string(31, 's'), 0600);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("31 bytes"));
    home.write_secret(std::string(4097, 's'), 0600);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("longer than 4096"));
    std::filesystem::remove(home.secret());
    ASSERT_EQ(::mkfifo(home.secret().c_str(), 0600), 0);
    EXPECT_THAT(user_secret(home.secret()).error().what, HasSubstr("is a pipe, not a file"));
}

TEST(UserSecret, IsInTheDirectoryOfTheXdgStandard) {
    EXPECT_EQ(*user_secret_path(environment({{"XDG_CONFIG_HOME", "/c"}, {"HOME", "/h"}})),
              "/c/ddprun/secret");
    EXPECT_EQ(*user_secret_path(environment({{"HOME", "/h"}})), "/h/.config/ddprun/secret");
    EXPECT_EQ(*user_secret_path(environment({{"XDG_CONFIG_HOME", "c"}, {"HOME", "/h"}})),
              "/h/.config/ddprun/secret")
        << "not absolute";
    EXPECT_EQ(user_secret_path(environment({{"HOME", "h"}})).error().code, Errc::NotFound);
}

// ---- which secret

TEST(JobToken, OfOneNodeIsRandomAndWritesNothing) {
    const Home home;
    JobSpec one = two_nodes();
    one.nodes = {1, 1};
    EXPECT_NE(token_of(one, home.variables()), token_of(one, home.variables()));
    EXPECT_EQ(home.files(), 0);
}

TEST(JobToken, IsWhatTheUserSays) {
    const Home home;
    EXPECT_EQ(token_of(two_nodes(), home.variables({{"DDPRUN_TOKEN", "secret of the job"}})),
              "secret of the job");
    EXPECT_EQ(home.files(), 0);
}

TEST(JobToken, ThatIsShortIsAcceptedWithAWarning) {
    const Home home;
    const auto warning_for = [&](const std::string& text) {
        return choose_job_token(two_nodes(), home.variables({{"DDPRUN_TOKEN", text}}))->warning;
    };
    EXPECT_THAT(warning_for("fifteen letters"),
                AllOf(HasSubstr("DDPRUN_TOKEN has 15 characters"), Not(HasSubstr("fifteen"))));
    EXPECT_EQ(warning_for("sixteen of these"), "");
}

TEST(JobToken, IsDerivedFromTheUsersSecretByDefault) {
    const Home home, another;
    const std::string token = token_of(two_nodes(), home.variables());
    EXPECT_EQ(token_of(two_nodes(), home.variables()), token) << "the other node's";
    EXPECT_NE(token_of(two_nodes(), another.variables()), token) << "a stranger who knows the id";
    EXPECT_NE(token_of(two_nodes("node01", 29400, "mine"), home.variables()), token);
    EXPECT_NE(token_of(two_nodes("node01", 29401), home.variables()), token);
    EXPECT_EQ(home.files(), 1);
}

TEST(JobToken, IsEqualForAllSpellingsOfTheHost) {
    const Home home;
    const std::string token = token_of(two_nodes("node01"), home.variables());
    for (const char* host : {"NODE01", "node01.cluster.example", "10.0.0.1", "localhost"}) {
        EXPECT_EQ(token_of(two_nodes(host), home.variables()), token) << host;
    }
    JobSpec by_address = two_nodes();
    by_address.rendezvous.endpoint.reset();
    by_address.rendezvous.master_addr = "node01";
    by_address.rendezvous.master_port = 29400;
    EXPECT_EQ(token_of(by_address, home.variables()), token);
}

TEST(JobToken, WithoutASecretTheJobIsRefusedWithTheRemedy) {
    const auto remedies = AllOf(HasSubstr("DDPRUN_TOKEN"), HasSubstr("--insecure"));
    EXPECT_THAT(error_of(two_nodes(), environment({})),
                AllOf(remedies, HasSubstr("neither XDG_CONFIG_HOME nor HOME")));
    EXPECT_THAT(error_of(two_nodes(), environment({{"HOME", "/dev/null"}})),
                AllOf(remedies, HasSubstr("/dev/null/.config/ddprun/secret: Not a directory")));
    EXPECT_THAT(error_of(two_nodes(), environment({{"HOME", "/proc"}})),
                AllOf(remedies, HasSubstr("mkdir /proc/.config")));
    const Home home;
    home.write_secret(std::string(32, 's'), 0644);
    EXPECT_THAT(error_of(two_nodes(), home.variables()), AllOf(remedies, HasSubstr(home.secret())));
}

TEST(JobToken, InsecureIsReportedAndEqualOnAllNodes) {
    const Home home;
    const Result<JobToken> by_variable =
        choose_job_token(two_nodes(), home.variables({{"DDPRUN_INSECURE", "1"}}));
    ASSERT_TRUE(by_variable);
    EXPECT_THAT(by_variable->warning, HasSubstr("whoever reaches the port"));
    JobSpec spec = two_nodes();
    spec.rendezvous.insecure = true;
    EXPECT_EQ(token_of(spec, environment({})), by_variable->token) << "a node without a home";
    EXPECT_EQ(home.files(), 0);
    EXPECT_NE(token_of(two_nodes(), home.variables({{"DDPRUN_INSECURE", "0"}})), by_variable->token);
    EXPECT_EQ(token_of(spec, home.variables({{"DDPRUN_TOKEN", "a secret"}})), "a secret") << "a secret wins";
}

TEST(JobToken, ARefusedNodeIsToldTheRemedy) {
    const Home home;
    const auto hint = [&](const JobSpec& spec, Variables more) {
        const Result<JobToken> token = choose_job_token(spec, home.variables(std::move(more)));
        EXPECT_TRUE(token);
        return token ? token->when_refused : "";
    };
    EXPECT_THAT(hint(two_nodes(), {}), AllOf(HasSubstr(home.secret() + ", which was made just now"),
                                             HasSubstr("copy that file"), HasSubstr("DDPRUN_TOKEN")));
    EXPECT_THAT(hint(two_nodes(), {}), AllOf(HasSubstr(home.secret()), Not(HasSubstr("just now"))));
    EXPECT_THAT(hint(two_nodes(), {{"DDPRUN_TOKEN", "x"}}),
                AllOf(HasSubstr("DDPRUN_TOKEN"), HasSubstr("if the head was started with --insecure")));
    EXPECT_THAT(hint(two_nodes(), {}), HasSubstr("if the head was started with --insecure"))
        << "its file may be the same";
    EXPECT_THAT(hint(two_nodes(), {{"DDPRUN_INSECURE", "1"}}), HasSubstr("--insecure"));
}

}  // namespace
}  // namespace ddprun
