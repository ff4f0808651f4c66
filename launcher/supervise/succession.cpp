#include "launcher/supervise/succession.h"

#include <algorithm>

#include "env/text.h"

namespace ddprun {

int choose_standby(const std::vector<HeirFacts>& by_group_rank) {
    const auto first = std::find_if(by_group_rank.begin(), by_group_rank.end(),
                                    [](const HeirFacts& one) { return one.is_connected && !one.is_heads; });
    return first == by_group_rank.end() ? -1 : static_cast<int>(first - by_group_rank.begin());
}

Succession judge_succession(const Orphans& orphans, bool time_is_up) {
    const int may_live = orphans.agents - (orphans.head_is_dead ? 1 : 0);
    const bool all_are_here = orphans.present >= orphans.agents - 1 && orphans.stopping <= 0;
    if (!all_are_here && !time_is_up) return Succession::Wait;
    if (2 * orphans.present <= may_live) return Succession::GiveUp;
    return orphans.head_may_run ? Succession::Wait : Succession::TakeOver;
}

Encounter meet_successor(const OtherHead& here) {
    if (here.is_successor) return Encounter::Ignore;
    return here.generation == 0 && here.can_join ? Encounter::Join : Encounter::Stop;
}

bool head_keeps_job(int agents, int present, int known_dead) { return 2 * present >= agents - known_dead; }

rdzv::Legacy legacy_of(const JobState& state, int agents, TimePoint now) {
    rdzv::Legacy legacy;
    legacy.generation = state.generation;
    legacy.restarts_used = state.restarts_used;
    for (const TimePoint restart : state.history.restarts)
        legacy.restart_ages_ns.push_back(std::to_string((now - restart).count()));
    legacy.without_progress = state.history.without_progress;
    legacy.age_ns = (now - state.generation_started).count();
    legacy.agents = agents;
    legacy.steps = state.history.furthest_step;
    return legacy;
}

JobState inherited(const rdzv::Legacy& legacy, TimePoint now) {
    JobState state;
    state.phase = JobState::Phase::Running;
    state.generation =
        legacy.generation + 1;  // it may have begun one more, of which only others, or nobody, has heard
    state.restarts_used = legacy.restarts_used;
    state.history.without_progress = legacy.without_progress;
    state.history.furthest_step = legacy.steps;
    for (const std::string& age : legacy.restart_ages_ns)
        state.history.restarts.push_back(now - Duration(parse_int(age).value_or(0)));
    state.generation_started = now - Duration(legacy.age_ns);
    state.nodes.resize(1);
    state.nodes[0].workers = 1;
    return state;
}

std::vector<EarlyAgent> newest_first(const std::map<rdzv::AgentId, rdzv::AgentHello>& early) {
    std::vector<EarlyAgent> all(early.begin(), early.end());
    std::stable_sort(all.begin(), all.end(), [](const EarlyAgent& a, const EarlyAgent& b) {
        return a.second.kept_generation > b.second.kept_generation;
    });
    return all;
}

void take_word(JobState& state, std::uint64_t generation, int restarts, TimePoint now) {
    state.generation = std::max(state.generation, generation + 1);
    for (; state.restarts_used < restarts; ++state.restarts_used) state.history.restarts.push_back(now);
}

}  // namespace ddprun
