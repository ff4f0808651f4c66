#pragma once

#include <string>
#include <utility>
#include <vector>

#include "launcher/head/job_state.h"

/// The decisions of one call of step(), story by story (see JobState). A story uses those above it, and no
/// other: each struct below knows only its bases. For the sources of job_state alone.
namespace ddprun {

using JobPhase = JobState::Phase;
using After = GenerationEnd::After;

/// The first story: a generation starts, is stopped and ends.
struct GenerationSteps {
    JobState& state;
    const JobPolicy& policy;
    TimePoint now;
    std::vector<JobAction> actions = {};

    GenerationSteps(JobState& job, const JobPolicy& with, TimePoint at) : state(job), policy(with), now(at) {}

    void act(JobAction action) { actions.push_back(std::move(action)); }
    void say(std::string text) { act(job_action::Say{std::move(text), false}); }
    void warn(std::string text) { act(job_action::Say{std::move(text), true}); }
    void set_timer(TimePoint when);
    /// Makes the timer later where it is set.
    void delay_timer(TimePoint until);
    /// Sets the timer for what is due next while workers go on, or wait to go on.
    void set_running_timer();

    void start();
    /// Begins a new generation on the same nodes, or waits for nodes again.
    void start_over();
    /// Decides what follows a generation, once no node of it is left.
    void continue_after_end();
    void finish();
    void finish_early(const std::string& why);
    void stop(int signal, Duration grace, int failed_rank, std::string why);
    /// Stops all workers as the user or the scheduler has asked.
    void stop_as_asked(GenerationEnd::Stop stop);
    /// True: a stop was held back until the suspended workers have a world again, which they will not have.
    bool stops_instead(const std::string& what);
    void kill_now();
    /// Tells all nodes once that a rank will never answer: its peers would wait in a collective until their
    /// grace is over.
    void end_collectives(int rank);

    /// Notes a cause that is no worker. The time of an earlier one stays (a node was lost, then no other
    /// came), because workers reacted to that.
    void note_failure(const std::string& why);
    /// Notes at a generation's end whether it made progress.
    void note_progress(bool made_progress);
    void use_up_restart();
    /// Handles a failure of the running generation: decides on a restart and stops what still runs.
    /// `not_in_place`: why it is not recovered in place; "" nobody expects that.
    void fail(const FailureFacts& facts, int failed_rank, const std::string& what, After retry,
              const std::string& not_in_place = {});
    /// Notes a failure that the other ranks outlive.
    void outlive(const job_event::WorkerEnded& event);
    /// Handles the end of a generation in which ranks outlived a failure.
    void end_outlived();
};

/// "not recovered in place: a rank has ended; ", or "".
std::string describe_refusal(const std::string& why);

/// The second story: a failure is recovered in place.
struct RecoverySteps : GenerationSteps {
    using GenerationSteps::GenerationSteps;
    using InPlace = Recovery::InPlace;

    /// The recovery under way, or a new one with this cause: a rehearsal, or a growth, becomes it.
    [[nodiscard]] InPlace recovery_of(const std::string& cause, bool is_workers) const;
    /// Decides whether the workers go on in place: those of nodes that stay, or of all nodes.
    [[nodiscard]] InPlaceDecision decide_without_leaving(const FailureFacts& facts,
                                                         const InPlace& recovery) const;
    [[nodiscard]] InPlaceDecision decide_with_all(const FailureFacts& facts, const InPlace& recovery) const;

    /// Begins the next generation, in which the workers that run go on.
    void begin_in_place(int failed_rank);
    /// Waits until all ranks have joined the generation in place, or all nodes have suspended theirs.
    void await_nodes();
    /// Notes with which step a node's ranks begin a generation in place.
    void note_begin(std::int64_t steps);
    void end_recovery();
    /// Stops a generation that not all nodes have confirmed as over, or that not all ranks have joined,
    /// although the agents have killed late ones.
    void give_up_recovery();
    /// Handles the failure of a recovery that no single worker's end explains.
    void fail_recovery(const InPlace& recovery, const std::string& why, After retry);
    /// Lets ranks that have finished end, now and later.
    void release();

    /// Ends the generation for one with other nodes, or with the same ones, in which the workers that run go
    /// on. `wait`: for this long more nodes may be lost.
    void suspend(InPlace recovery, Duration wait, const std::string& why);
    /// Asks for the next world once all nodes have confirmed that the generation is over, and no further loss
    /// is expected.
    void reform_when_due();
    void expect_no_more_losses();
    /// Stops the workers when they have a world again, if they are suspended.
    void stop_when_possible(const GenerationEnd::Stop& stop);

    /// Handles a worker's failure in the running or suspended generation.
    void lose_rank(const job_event::WorkerEnded& event);
    /// Handles the end of a rank that has ended with 0 before it had joined the others, who wait for it. The
    /// first such end says it all; in programs without libddp, every end is one.
    void lose_before_joining(int rank);
    /// Handles a worker's failure while the workers stop. One that the stop's own signal has ended, or that
    /// exits with an error, would do so again.
    void lose_while_stopping(const job_event::WorkerEnded& event);
    /// Handles what nodes say of workers while these stop.
    void hear_while_stopping(const job_event::NodeReady& event);
    /// Handles workers that leave the generation, for another reason than that ddprun told them. Usually the
    /// end of a worker is reported within `patience`.
    void note_let_go(Duration patience, const std::string& why);
    /// Forms the world of the same nodes anew, when nobody's end explains why its ranks have left it.
    void form_again();

  private:
    void recover_rank(const job_event::WorkerEnded& event);
    void note_steps(std::int64_t steps);
    [[nodiscard]] bool can_save_in_place(const FailureFacts& facts) const;
    void save_in_place(int rank, const std::string& what);
};

/// "7 ranks go".
std::string describe_going_on(int ranks);
/// "rank 5 starts", "ranks 4, 5 start".
std::string describe_starting(const std::vector<int>& ranks);
/// "rank 5 is lost", "ranks 4, 5 are lost".
std::string describe_lost(const std::vector<int>& ranks);

/// The third story: the nodes of the world change.
struct WorldSteps : RecoverySteps {
    using RecoverySteps::RecoverySteps;

    /// Begins the suspended generation's successor on the nodes of the next world.
    void reform(const job_event::WorldFormed& event);
    /// Lets the others go on in place without the nodes that leave.
    void go_on_without_leaving();
    /// Takes in the waiting nodes. After kStuckGenerations without progress they wait until this generation
    /// has made some: a node that comes and goes for ever must not stop the others each time.
    void grow_when_due();
    /// Handles the loss of a node whose workers run.
    void lose_node(const job_event::NodeLost& event);
    /// Handles the loss of a node while no generation needs it.
    void lose_idle_node(const job_event::NodeLost& event, bool had_workers, bool is_first);
    /// Handles SIGTERM at a node that may leave.
    void leave(const job_event::StopAsked& event);

  private:
    void change_world(const std::string& why, Duration grace, TimePoint when);
    [[nodiscard]] RestartDecision decide_change() const;
    void go_on_elsewhere(const job_event::NodeLost& event, const std::string& not_in_place);
    InPlaceDecision lose_in_place(const job_event::NodeLost& event);
    void charge_restart(const job_event::NodeLost& event);
    bool leave_in_place(const job_event::StopAsked& event, const std::string& why);
};

}  // namespace ddprun
