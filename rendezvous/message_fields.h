#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "rendezvous/json_fields.h"
#include "rendezvous/message.h"

/// Private to message.cpp: the protocol's table of types, and the JSON fields of every message. The names
/// here are the wire's: a name that was released stays.
namespace ddprun::rdzv {

enum class Type : std::uint8_t {
    Hello = 1,
    Challenge = 2,
    Proof = 3,
    Welcome = 4,
    Failure = 5,
    Heartbeat = 6,
    Set = 16,
    Get = 17,
    TryGet = 18,
    Add = 19,
    CompareSet = 20,
    Erase = 21,
    Wait = 22,
    Barrier = 23,
    Done = 32,
    Value = 33,
    Absent = 34,
    Sum = 35,
    Exchanged = 36,
    Erased = 37,
    AgentHello = 64,
    WorkersStarted = 65,
    WorkerExited = 66,
    GenerationDrained = 67,
    StartGeneration = 80,
    StopGeneration = 81,
    Shutdown = 82,
    Notice = 96,
    Question = 97,
    Answer = 98,
};

/// What a T is called, on the wire and in logs.
template <class T>
inline constexpr std::pair<Type, std::string_view> kTag{};
template <>
inline constexpr std::pair kTag<Hello>{Type::Hello, std::string_view("Hello")};
template <>
inline constexpr std::pair kTag<Challenge>{Type::Challenge, std::string_view("Challenge")};
template <>
inline constexpr std::pair kTag<Proof>{Type::Proof, std::string_view("Proof")};
template <>
inline constexpr std::pair kTag<Welcome>{Type::Welcome, std::string_view("Welcome")};
template <>
inline constexpr std::pair kTag<Failure>{Type::Failure, std::string_view("Failure")};
template <>
inline constexpr std::pair kTag<Heartbeat>{Type::Heartbeat, std::string_view("Heartbeat")};
template <>
inline constexpr std::pair kTag<store_op::Set>{Type::Set, std::string_view("Set")};
template <>
inline constexpr std::pair kTag<store_op::Get>{Type::Get, std::string_view("Get")};
template <>
inline constexpr std::pair kTag<store_op::TryGet>{Type::TryGet, std::string_view("TryGet")};
template <>
inline constexpr std::pair kTag<store_op::Add>{Type::Add, std::string_view("Add")};
template <>
inline constexpr std::pair kTag<store_op::CompareSet>{Type::CompareSet, std::string_view("CompareSet")};
template <>
inline constexpr std::pair kTag<store_op::Erase>{Type::Erase, std::string_view("Erase")};
template <>
inline constexpr std::pair kTag<store_op::Wait>{Type::Wait, std::string_view("Wait")};
template <>
inline constexpr std::pair kTag<store_op::Barrier>{Type::Barrier, std::string_view("Barrier")};
template <>
inline constexpr std::pair kTag<Done>{Type::Done, std::string_view("Done")};
template <>
inline constexpr std::pair kTag<Value>{Type::Value, std::string_view("Value")};
template <>
inline constexpr std::pair kTag<Absent>{Type::Absent, std::string_view("Absent")};
template <>
inline constexpr std::pair kTag<Sum>{Type::Sum, std::string_view("Sum")};
template <>
inline constexpr std::pair kTag<Exchanged>{Type::Exchanged, std::string_view("Exchanged")};
template <>
inline constexpr std::pair kTag<Erased>{Type::Erased, std::string_view("Erased")};
template <>
inline constexpr std::pair kTag<AgentHello>{Type::AgentHello, std::string_view("AgentHello")};
template <>
inline constexpr std::pair kTag<WorkersStarted>{Type::WorkersStarted, std::string_view("WorkersStarted")};
template <>
inline constexpr std::pair kTag<WorkerExited>{Type::WorkerExited, std::string_view("WorkerExited")};
template <>
inline constexpr std::pair kTag<GenerationDrained>{Type::GenerationDrained,
                                                   std::string_view("GenerationDrained")};
template <>
inline constexpr std::pair kTag<StartGeneration>{Type::StartGeneration, std::string_view("StartGeneration")};
template <>
inline constexpr std::pair kTag<StopGeneration>{Type::StopGeneration, std::string_view("StopGeneration")};
template <>
inline constexpr std::pair kTag<Shutdown>{Type::Shutdown, std::string_view("Shutdown")};
template <>
inline constexpr std::pair kTag<Notice>{Type::Notice, std::string_view("Notice")};
template <>
inline constexpr std::pair kTag<Question>{Type::Question, std::string_view("Question")};
template <>
inline constexpr std::pair kTag<Answer>{Type::Answer, std::string_view("Answer")};

inline constexpr std::array<std::pair<Errc, std::string_view>, 10> kErrorNames{{
    {Errc::System, "system"},
    {Errc::InvalidArgument, "invalid_argument"},
    {Errc::NotFound, "not_found"},
    {Errc::Timeout, "timeout"},
    {Errc::Closed, "closed"},
    {Errc::Refused, "refused"},
    {Errc::StaleGeneration, "stale_generation"},
    {Errc::Mismatch, "mismatch"},
    {Errc::Protocol, "protocol"},
    {Errc::Limit, "limit"},
}};

inline constexpr std::array kRoles{Role::Agent, Role::Worker, Role::Tool};

/// M is T, const when it is written.
template <class M, class T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

template <class F, class M>
requires std::is_empty_v<M> || Is<M, Value>
void fields(F&, M&) {}

template <class F, Is<Hello> M>
void fields(F& f, M& m) {
    std::string role = role_name(m.role);
    f("role", role);
    if constexpr (!std::is_const_v<M>) {
        const auto is_named = [&](Role one) { return role == role_name(one); };
        const auto found = std::find_if(kRoles.begin(), kRoles.end(), is_named);
        if (found == kRoles.end()) f.fail(fmt::format("'role' is '{}'", role));
        else m.role = *found;
    }
    f("name", m.name);
    f("job_id", m.job_id);
    f("nonce", m.nonce);
}
template <class F, Is<Challenge> M>
void fields(F& f, M& m) {
    f("nonce", m.nonce);
}
template <class F, Is<Proof> M>
void fields(F& f, M& m) {
    f("mac", m.mac);
}
template <class F, Is<Welcome> M>
void fields(F& f, M& m) {
    f("mac", m.mac);
}
template <class F, Is<store_op::Set> M>
void fields(F& f, M& m) {
    f("key", m.key);
}
template <class F, Is<store_op::Get> M>
void fields(F& f, M& m) {
    f("key", m.key);
}
template <class F, Is<store_op::TryGet> M>
void fields(F& f, M& m) {
    f("key", m.key);
}
template <class F, Is<store_op::Erase> M>
void fields(F& f, M& m) {
    f("key", m.key);
}
template <class F, Is<store_op::CompareSet> M>
void fields(F& f, M& m) {
    f("key", m.key);
}
template <class F, Is<store_op::Add> M>
void fields(F& f, M& m) {
    f("key", m.key);
    f("delta", m.delta);
}
template <class F, Is<store_op::Wait> M>
void fields(F& f, M& m) {
    f("keys", m.keys);
}
template <class F, Is<store_op::Barrier> M>
void fields(F& f, M& m) {
    f("name", m.name);
    f("participants", m.participants);
}
template <class F, Is<Sum> M>
void fields(F& f, M& m) {
    f("sum", m.sum);
}
template <class F, Is<Exchanged> M>
void fields(F& f, M& m) {
    f("swapped", m.swapped);
}
template <class F, Is<Erased> M>
void fields(F& f, M& m) {
    f("existed", m.existed);
}
template <class F, Is<AgentHello> M>
void fields(F& f, M& m) {
    f("host", m.host);
    f("node_rank", m.node_rank);
    f("slots", m.slots);
    f("pid", m.pid);
    f("version", m.version);
    f("addresses", m.addresses);
    f("spec_hash", m.spec_hash);
    f.defaulted("role", m.role);
}
template <class F, Is<WorkersStarted> M>
void fields(F& f, M& m) {
    f("generation", m.generation);
}
template <class F, Is<WorkerExited> M>
void fields(F& f, M& m) {
    f("generation", m.generation);
    f("local_rank", m.local_rank);
    f("rank", m.rank);
    f("pid", m.pid);
    f("status", m.status);
    f("after_start_ns", m.after_start_ns);
    f.usually("signaled", m.signaled, false);
    f.usually("dumped_core", m.dumped_core, false);
    f.usually("by_us", m.by_us, false);
    f.usually("exec_failure", m.exec_failure, std::string());
    f.usually("last_stderr", m.last_stderr, std::vector<std::string>());
    f.usually("error_file", m.error_file, std::string());
    f.usually("meaning", m.meaning, std::string());
    f.usually("last_collective", m.last_collective, std::string());
    f.usually("steps", m.steps, std::int64_t{-1});
    f.usually("stopped_failing", m.stopped_failing, false);
    f.usually("error_age_ns", m.error_age_ns, std::int64_t{-1});
}
template <class F, Is<GenerationDrained> M>
void fields(F& f, M& m) {
    f("generation", m.generation);
    f("notes", m.notes);
}
template <class F, Is<StartGeneration> M>
void fields(F& f, M& m) {
    f("generation", m.generation);
    f("group_rank", m.group_rank);
    f("group_world_size", m.group_world_size);
    f("first_rank", m.first_rank);
    f("world_size", m.world_size);
    f("local_world_sizes", m.local_world_sizes);
    f.defaulted("role_first_rank", m.role_first_rank);
    f.defaulted("role_world_size", m.role_world_size);
    f("master_addr", m.master_addr);
    f("master_port", m.master_port);
    f("restart_count", m.restart_count);
    f("max_restarts", m.max_restarts);
}
template <class F, Is<StopGeneration> M>
void fields(F& f, M& m) {
    f("generation", m.generation);
    f("signal", m.signal);
    f("grace_ns", m.grace_ns);
    f.defaulted("failed_rank", m.failed_rank);
    f("why", m.why);
}
template <class F, Is<Shutdown> M>
void fields(F& f, M& m) {
    f("exit_code", m.exit_code);
    f("why", m.why);
}
template <class F, Is<Notice> M>
void fields(F& f, M& m) {
    f("kind", m.kind);
    f("text", m.text);
}
template <class F, Is<Question> M>
void fields(F& f, M& m) {
    f("number", m.number);
    f("request", m.request);
}
template <class F, Is<Answer> M>
void fields(F& f, M& m) {
    f("number", m.number);
}

}  // namespace ddprun::rdzv
