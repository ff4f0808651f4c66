#include "launcher/questions/inquiry.h"

#include <fmt/core.h>

#include <utility>

#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::size_t kMostAnswerBytes = 8 * 1024 * 1024;
/// The time for a node's question to the head and the answer's way back, besides the head's own wait.
constexpr Duration kOnTheWay = std::chrono::seconds(1);

/// An answer that may be called twice: the second call does nothing.
Inquiry::Answer once(Inquiry::Answer answer) {
    return [answer = std::make_shared<Inquiry::Answer>(std::move(answer))](std::string line) {
        if (line.size() > kMostAnswerBytes)
            line = control_error(fmt::format("the answer is longer than {}", format_bytes(kMostAnswerBytes)));
        if (*answer) std::exchange(*answer, nullptr)(std::move(line));
    };
}

std::string not_known(const std::string& request) {
    return control_error(fmt::format("'{}' is not known to this ddprun", request));
}

}  // namespace

Inquiry::~Inquiry() {
    for (const auto& [number, asked] : asked_) loop_.cancel(asked.timer);
}

void Inquiry::ask_job(const ControlRequest& request, const Answer& answer) {
    const auto timeout = timeouts_.find(request.name);
    const auto handler = job_handlers_.find(request.name);
    if (handler != job_handlers_.end()) return handler->second(request, once(answer));
    if (timeout == timeouts_.end()) return answer(not_known(request.name));
    pass_to_head(request, timeout->second + kOnTheWay, once(answer));
}

void Inquiry::ask_job(const ControlRequest& request, const RequestReply& reply) {
    ask_job(request, [reply](const std::string& line) {
        reply.send(line);
        reply.finish();
    });
}

// ---- a node asks the head

void Inquiry::answer_alone(const ControlRequest& request, const std::string& why,
                           const Answer& answer) const {
    const auto alone = alone_handlers_.find(request.name);
    if (alone != alone_handlers_.end()) return alone->second(request, why, answer);
    answer(control_error(why));
}

void Inquiry::pass_to_head(const ControlRequest& request, Duration timeout, const Answer& answer) {
    if (asked_.size() >= kMostQuestions) return answer(control_error("too many questions at once"));
    const std::uint64_t number = next_number_++;
    if (!to_head_(rdzv::Question{number, encode(request)})) {
        return answer_alone(request, "this node has no connection to the head of the job", answer);
    }
    const os::EventLoop::TimerId timer = loop_.call_after(timeout, [this, number, timeout] {
        const Asked asked = std::move(asked_.extract(number).mapped());
        answer_alone(asked.request,
                     fmt::format("the head of the job gave no answer in {}", format_duration(timeout)),
                     asked.answer);
    });
    asked_[number] = {request, answer, timer};
}

void Inquiry::head_lost(const std::string& why) {
    alive_ = std::make_shared<bool>(true);  // drops open answers to the lost head
    for (const auto& [number, asked] : std::exchange(asked_, {})) {
        loop_.cancel(asked.timer);
        answer_alone(asked.request, why, asked.answer);
    }
}

void Inquiry::from_head(const rdzv::Answer& answer) {
    auto asked = asked_.extract(answer.number);
    if (asked.empty()) return;  // too late: the asker has got an error
    loop_.cancel(asked.mapped().timer);
    asked.mapped().answer(std::string(answer.value.view()));
}

void Inquiry::from_head(const rdzv::Question& question) {
    const std::weak_ptr<bool> alive = alive_;
    const Answer reply = once([this, alive, number = question.number](std::string line) {
        if (!alive.expired()) to_head_(rdzv::Answer{number, rdzv::Blob(std::move(line))});
    });
    const Result<ControlRequest> request = decode_control_request(question.request);
    if (!request) return reply(control_error(request.error().what));
    const auto handler = node_handlers_.find(request->name);
    if (handler == node_handlers_.end()) return reply(not_known(request->name));
    handler->second(*request, reply);
}

std::string describe_node(const WorldNode& node) {
    if (node.workers == 1) return fmt::format("{} (rank {})", node.host, node.first_rank);
    return fmt::format("{} (ranks {}-{})", node.host, node.first_rank, node.first_rank + node.workers - 1);
}

Survey::~Survey() {
    for (const auto& [number, round] : rounds_) parts_.loop.cancel(round.timer);
}

void Survey::from_agent(rdzv::AgentId agent, const rdzv::Question& question) {
    const std::weak_ptr<bool> alive = alive_;
    const auto reply = [this, alive, agent, number = question.number](std::string line) {
        if (!alive.expired()) parts_.to_agent(agent, rdzv::Answer{number, rdzv::Blob(std::move(line))});
    };
    const Result<ControlRequest> request = decode_control_request(question.request);
    if (!request) return reply(control_error(request.error().what));
    parts_.inquiry.ask_job(*request, reply);
}

void Survey::ask_nodes(const ControlRequest& request, std::optional<int> rank, Duration timeout,
                       Gathered gathered) {
    if (rounds_.size() >= kMostQuestions) return gathered({});
    const std::uint64_t number = next_number_++;
    Round& round = rounds_[number];
    round.gathered = std::move(gathered);
    const std::string late = fmt::format("no answer in {}", format_duration(timeout));
    for (WorldNode& node : parts_.world()) {
        if (rank && (*rank < node.first_rank || *rank >= node.first_rank + node.workers)) continue;
        round.answers.push_back({std::move(node), "", late});
    }
    round.waits.assign(round.answers.size(), true);
    // Count one more, so that a connection that fails during a write does not end the round in this loop.
    round.missing = round.answers.size() + 1;
    const rdzv::Question question = rdzv::Question{number, encode(request)};
    for (const NodeAnswer& asked : round.answers) {
        const bool sent = asked.node.is_connected && parts_.to_agent(asked.node.agent, question);
        if (!sent) note(number, asked.node.agent, "", "no connection");
    }
    if (--round.missing == 0) return finish(number);
    round.timer = parts_.loop.call_after(timeout, [this, number] { finish(number); });
}

void Survey::note(std::uint64_t number, rdzv::AgentId agent, std::string line, const std::string& trouble) {
    const auto found = rounds_.find(number);
    if (found == rounds_.end()) return;
    Round& round = found->second;
    for (std::size_t i = 0; i < round.answers.size(); ++i) {
        if (round.answers[i].node.agent != agent || !round.waits[i]) continue;
        round.waits[i] = false;
        round.answers[i].line = std::move(line);
        round.answers[i].trouble = trouble;
        if (--round.missing == 0) finish(number);
        return;
    }
}

void Survey::finish(std::uint64_t number) {
    Round round = std::move(rounds_.extract(number).mapped());
    parts_.loop.cancel(round.timer);
    round.gathered(std::move(round.answers));
}

void Survey::from_agent(rdzv::AgentId agent, const rdzv::Answer& answer) {
    std::string line(answer.value.view());
    if (line.empty()) line = control_error("an empty answer");
    note(answer.number, agent, std::move(line), "");
}

void Survey::agent_lost(rdzv::AgentId agent) {
    std::vector<std::uint64_t> numbers;
    for (const auto& [number, round] : rounds_) numbers.push_back(number);
    for (const std::uint64_t number : numbers) note(number, agent, "", "its connection was lost");
}

}  // namespace ddprun
