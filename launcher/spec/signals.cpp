#include "launcher/spec/signals.h"

#include <fmt/core.h>
#include <pthread.h>
#include <signal.h>

#include <utility>

#include "env/text.h"

namespace ddprun {
namespace {

// The table replaces sigabbrev_np, which glibc has only since 2.32.
constexpr std::pair<int, std::string_view> kSignalNames[] = {
    {SIGHUP, "HUP"},       {SIGINT, "INT"},   {SIGQUIT, "QUIT"},   {SIGILL, "ILL"},   {SIGTRAP, "TRAP"},
    {SIGABRT, "ABRT"},     {SIGBUS, "BUS"},   {SIGFPE, "FPE"},     {SIGKILL, "KILL"}, {SIGUSR1, "USR1"},
    {SIGSEGV, "SEGV"},     {SIGUSR2, "USR2"}, {SIGPIPE, "PIPE"},   {SIGALRM, "ALRM"}, {SIGTERM, "TERM"},
    {SIGSTKFLT, "STKFLT"}, {SIGCHLD, "CHLD"}, {SIGCONT, "CONT"},   {SIGSTOP, "STOP"}, {SIGTSTP, "TSTP"},
    {SIGTTIN, "TTIN"},     {SIGTTOU, "TTOU"}, {SIGURG, "URG"},     {SIGXCPU, "XCPU"}, {SIGXFSZ, "XFSZ"},
    {SIGVTALRM, "VTALRM"}, {SIGPROF, "PROF"}, {SIGWINCH, "WINCH"}, {SIGPOLL, "POLL"}, {SIGPWR, "PWR"},
    {SIGSYS, "SYS"}};

bool is_ignored(int signal) {
    struct sigaction action {};
    return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

void mask_handled_signals(int how) {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : handled_signals()) ::sigaddset(&set, signal);
    ::pthread_sigmask(how, &set, nullptr);
}

}  // namespace

const std::vector<int>& handled_signals() {
    static const std::vector<int> signals{SIGCHLD, SIGTERM, SIGINT,   SIGHUP,  SIGQUIT, SIGUSR1, SIGUSR2,
                                          SIGCONT, SIGTSTP, SIGWINCH, SIGALRM, SIGPIPE, SIGXFSZ};
    return signals;
}

void block_handled_signals() { mask_handled_signals(SIG_BLOCK); }
void unblock_handled_signals() { mask_handled_signals(SIG_UNBLOCK); }

StoppableWait::StoppableWait() {
    sigset_t stops;
    ::sigemptyset(&stops);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) ::sigaddset(&stops, signal);
    ::pthread_sigmask(SIG_UNBLOCK, &stops, &before_);
}
StoppableWait::~StoppableWait() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void complete_signals(std::map<int, SignalAction>& actions) {
    for (const auto& [signal, action] : actions) {
        if (is_ignored(signal)) ::signal(signal, SIG_DFL);
    }
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT})
        actions.emplace(signal, is_ignored(signal) ? SignalAction::Ignore : SignalAction::Stop);
    for (const int signal : {SIGUSR1, SIGUSR2, SIGTSTP, SIGWINCH})
        actions.emplace(signal, is_ignored(signal) ? SignalAction::Ignore : SignalAction::Forward);
    actions.emplace(SIGCONT, SignalAction::Forward);  // continues also a process that ignores it
}

std::optional<int> signal_from_name(std::string_view name) {
    if (const Result<std::int64_t> number = parse_int(name)) {
        if (*number < 1 || *number >= SIGRTMAX) return std::nullopt;
        return static_cast<int>(*number);
    }
    std::string word = lower(name);
    if (word.starts_with("sig")) word.erase(0, 3);
    for (const auto& [signal, abbreviation] : kSignalNames) {
        if (lower(abbreviation) == word) return signal;
    }
    return std::nullopt;
}

std::string signal_name(int signal) {
    for (const auto& [number, abbreviation] : kSignalNames) {
        if (number == signal) return fmt::format("SIG{}", abbreviation);
    }
    return fmt::format("signal {}", signal);
}

}  // namespace ddprun
