#include "launcher/questions/survey.h"

#include <fmt/core.h>

#include <utility>

#include "env/text.h"

namespace ddprun {

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
