#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/hang/hang_sample.h"
#include "launcher/questions/inquiry.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// The head of a job of two nodes. The fixture keeps its messages, and the test gives the answers.
class HeadSurvey : public ::testing::Test {
  protected:
    void SetUp() override {
        Result<std::unique_ptr<os::EventLoop>> loop = os::EventLoop::create({});
        ASSERT_TRUE(loop);
        loop_ = std::move(*loop);
        inquiry_.emplace(*loop_, [](const rdzv::FromAgent&) { return false; });
        Survey::Parts parts{*loop_, *inquiry_,
                            [this](std::uint64_t agent, const rdzv::ToAgent& message) {
                                if (agent == broken_) survey_->agent_lost(agent);
                                if (agent == broken_) return false;
                                if (const auto* question = std::get_if<rdzv::Question>(&message))
                                    asked_.emplace_back(agent, question->number);
                                if (const auto* answer = std::get_if<rdzv::Answer>(&message))
                                    answered_.emplace_back(answer->value.view());
                                return true;
                            },
                            [this] { return world_; }};
        survey_.emplace(std::move(parts));
    }

    void ask(std::optional<int> rank = std::nullopt, Duration timeout = 60s) {
        survey_->ask_nodes({"status", {}}, rank, timeout, [this](std::vector<NodeAnswer> answers) {
            ++rounds_;
            heard_.clear();
            for (const NodeAnswer& answer : answers)
                heard_.push_back(answer.node.host + ": " + answer.line + answer.trouble);
        });
    }
    void answer(std::size_t question, const std::string& line) {
        survey_->from_agent(asked_[question].first, rdzv::Answer{asked_[question].second, rdzv::Blob(line)});
    }

    std::unique_ptr<os::EventLoop> loop_;
    std::vector<WorldNode> world_ = {{7, "a", 0, 2, true}, {5, "b", 2, 2, true}};
    std::uint64_t broken_ = 0;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> asked_;
    std::vector<std::string> answered_, heard_;
    int rounds_ = 0;
    std::optional<Inquiry> inquiry_;
    std::optional<Survey> survey_;
};

TEST_F(HeadSurvey, AnswersAreInTheWorldsOrder) {
    ask();
    answer(1, "two");
    EXPECT_EQ(rounds_, 0);
    answer(0, "one");
    EXPECT_THAT(heard_, ElementsAre("a: one", "b: two"));
}

TEST_F(HeadSurvey, OnlyTheNodeOfTheRankGetsTheQuestion) {
    ask(3);
    ASSERT_EQ(asked_.size(), 1u);
    answer(0, "two");
    EXPECT_THAT(heard_, ElementsAre("b: two"));
    ask(4);
    EXPECT_TRUE(heard_.empty());
    EXPECT_EQ(rounds_, 2);
}

TEST_F(HeadSurvey, ALostOrSilentNodeIsNamedAndDelaysNoOther) {
    ask();
    answer(0, "one");
    survey_->agent_lost(5);
    EXPECT_THAT(heard_, ElementsAre("a: one", "b: its connection was lost"));

    ask(std::nullopt, 1ms);
    answer(2, "one");
    while (rounds_ < 2) ASSERT_TRUE(loop_->run_once(MonotonicClock::now() + 10s));
    EXPECT_THAT(heard_, ElementsAre("a: one", HasSubstr("b: no answer in ")));
    answer(3, "too late");
    EXPECT_EQ(rounds_, 2);

    world_[1].is_connected = false;
    ask();
    answer(4, "one");
    EXPECT_THAT(heard_, ElementsAre("a: one", "b: no connection"));
}

TEST_F(HeadSurvey, AConnectionThatBreaksDuringAWriteEndsTheRoundOnce) {
    broken_ = 5;
    ask();
    EXPECT_EQ(rounds_, 0);
    answer(0, "one");
    EXPECT_EQ(rounds_, 1);
    world_ = {{5, "b", 0, 2, true}};
    ask();
    EXPECT_EQ(rounds_, 2);
    EXPECT_THAT(heard_, ElementsAre("b: its connection was lost"));
}

TEST_F(HeadSurvey, AnAgentsQuestionIsAnsweredOnceWithItsNumberEvenIfMalformed) {
    inquiry_->on_job("twice", [](const ControlRequest&, const Inquiry::Answer& answer) {
        answer("first");
        answer("second");
    });
    survey_->from_agent(7, rdzv::Question{1, encode({"twice", {}})});
    EXPECT_THAT(answered_, ElementsAre("first"));
    survey_->from_agent(7, rdzv::Question{2, "no request"});
    survey_->from_agent(7, rdzv::Question{3, encode({"unheard of", {}})});
    EXPECT_THAT(answered_,
                ElementsAre("first", HasSubstr("not a JSON object"), HasSubstr("'unheard of' is not known")));
}

TEST_F(HeadSurvey, AnAnswerToNoQuestionIsIgnored) {
    survey_->from_agent(7, rdzv::Answer{99, rdzv::Blob("what?")});
    inquiry_->from_head(rdzv::Answer{99, rdzv::Blob("what?")});
    EXPECT_EQ(rounds_, 0);
}

TEST_F(HeadSurvey, TooManyQuestionsAtOnceAreRefused) {
    for (int i = 0; i < 300; ++i) ask();
    EXPECT_EQ(asked_.size(), 2u * 256);
    EXPECT_EQ(rounds_, 300 - 256);
}

/// A node whose head is another node and never answers.
class NodeInquiry : public ::testing::Test {
  protected:
    NodeInquiry()
        : inquiry_(*loop_,
                   [this](rdzv::FromAgent message) { return said_.push_back(std::move(message)), true; }) {
        inquiry_.takes("status", 60s);
    }
    std::string ask() {
        answer_.clear();
        inquiry_.ask_job({"status", {}}, [this](const std::string& line) { answer_ += line; });
        return answer_;
    }

    std::unique_ptr<os::EventLoop> loop_ = *os::EventLoop::create({});
    std::vector<rdzv::FromAgent> said_;
    std::string answer_;
    Inquiry inquiry_;
};

TEST_F(NodeInquiry, AnOpenQuestionIsAnsweredWithTheReasonWhenTheHeadIsLost) {
    EXPECT_EQ(ask(), "");
    inquiry_.head_lost("the head is lost");
    EXPECT_THAT(answer_, HasSubstr("the head is lost"));
    inquiry_.from_head(rdzv::Answer{std::get<rdzv::Question>(said_.at(0)).number, rdzv::Blob("late")});
    EXPECT_THAT(answer_, Not(HasSubstr("late")));
}

TEST_F(NodeInquiry, AnswersForTheJobAfterItBecameTheHead) {
    inquiry_.head_lost("the head is lost");
    inquiry_.on_job("status", [](const ControlRequest&, const Inquiry::Answer& answer) {
        answer("the job, by its head");
    });
    EXPECT_EQ(ask(), "the job, by its head");
}

TEST_F(NodeInquiry, ALateAnswerToTheLostHeadDoesNotReachTheNext) {
    Inquiry::Answer answer;
    inquiry_.on_node("stacks", [&](const ControlRequest&, const Inquiry::Answer& reply) { answer = reply; });
    inquiry_.from_head(rdzv::Question{1, encode({"stacks", {}})});
    inquiry_.head_lost("the head is lost");
    answer("stacks");
    EXPECT_TRUE(said_.empty());
}

TEST(NodeLook, IsDecodedAsItWasSent) {
    HangSample sample;
    sample.rank = 5;
    sample.stopped = true;
    sample.cpu = 17ms;
    sample.started_seq = UINT64_MAX;
    sample.operation = SegmentOp::AllReduce;
    sample.awaited = true;
    const NodeLook look{3, true, "node02", {sample, sample}};
    EXPECT_EQ(answer_from<NodeLook>(answer_of(look)).value_or(NodeLook{}), look);
}

TEST(NodeLook, MalformedTextIsAnError) {
    for (
        const char* line :
        {"", "[]", "{}", R"({"ok":true,"generation":-1,"is_running":true,"ranks":[]})",
         R"({"ok":true,"generation":1,"is_running":1,"ranks":[]})",
         R"({"ok":true,"generation":1,"is_running":true,"ranks":[[1]]})",
         R"({"ok":true,"generation":1,"is_running":true,"ranks":[[1,1,1,1,1,1,1,1,1,1,1]]})",
         R"({"ok":true,"generation":1,"is_running":true,"ranks":[[4294967296,true,false,1,1,1,true,1,1,1,1]]})"}) {
        EXPECT_FALSE(answer_from<NodeLook>(line)) << line;
    }
}

}  // namespace
}  // namespace ddprun::test
