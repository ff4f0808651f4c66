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

// agent -> worker
inline constexpr char kPreempt = 'P';  ///< save and stop; payload: the reason, text

/// Longest packet either side sends.
inline constexpr unsigned kMaxPacket = 16 * 1024;

}  // namespace ddprun::lifeline
