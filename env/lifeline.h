#pragma once

/// The lifeline: a SOCK_SEQPACKET socket pair between the agent and one worker (DDPRUN_LIFELINE_FD). One
/// packet is one message; its first byte is the kind, so that a program in any language can take part with
/// one write. The socket closes when the agent dies: the worker reads end-of-file.
namespace ddprun::lifeline {

// worker -> agent
inline constexpr char kReady = 'R';  ///< start-up is over; no payload
/// A thread's stack, as text: the answer to the signal in RankLine::stack_signal.
inline constexpr char kStack = 'S';
/// The worker makes progress; optional payload: steps done, decimal (docs/events.md, "Hangs").
inline constexpr char kHeartbeat = 'H';

// worker -> agent, recovery in place. Numbers are decimal; fields are divided by one space. kReady may have a
// payload: "in-place GENERATION STEPS" where the worker survives the end of a generation, and has joined this
// one after so many steps ("in-place 0": none yet); "restart WHY" where it does not.
inline constexpr char kCome = 'C';      ///< "GENERATION": it waits for the other ranks of this one
inline constexpr char kLetGo = 'L';     ///< "GENERATION STEPS WHY": it has left its group, and waits
inline constexpr char kFinished = 'F';  ///< "GENERATION": its work is done; it waits for kRelease

// agent -> worker
inline constexpr char kPreempt = 'P';  ///< save and stop; payload: the reason, text

// agent -> worker, recovery in place.
/// The next generation: lines "NAME=value" of the worker's environment (env/worker_env.h) that replace its
/// own, with the generation's segment as a descriptor (SCM_RIGHTS). No payload: no generation follows.
inline constexpr char kGeneration = 'G';
inline constexpr char kRelease = 'E';  ///< "GENERATION": all ranks have finished

/// Longest packet either side sends.
inline constexpr unsigned kMaxPacket = 16 * 1024;

}  // namespace ddprun::lifeline
