#include "launcher/hang/stack_text.h"

#include <fmt/core.h>

#include <cctype>
#include <map>

#include "env/describe.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// The text without gdb's messages before the first thread: libraries loaded, files not found.
std::string_view without_preamble(StackMethod method, std::string_view text) {
    if (method != StackMethod::Gdb) return text;
    const std::size_t first = text.starts_with("Thread ") ? 0 : text.find("\nThread ");
    return first == std::string_view::npos ? text : text.substr(first);
}

std::vector<std::string_view> lines_of(const RankStack& stack) {
    std::vector<std::string_view> lines;
    for (const std::string_view line : split(without_preamble(stack.method, stack.text), '\n')) {
        const bool is_farewell = line.starts_with("[Inferior ");  // gdb's
        if (!trim(line).empty() && !is_farewell) lines.push_back(line);
    }
    return lines;
}

/// The line without "0x7f12...", "+0x1c]" and the arguments in a frame's brackets ("#3 step (rank=3, x=...)
/// at a.c:7").
std::string frame_key(std::string_view line) {
    std::string key;
    int depth = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const char c = line[at];
        if (c == '(' && line.front() == '#') ++depth;
        else if (c == ')' && depth > 0) --depth;
        else if (depth > 0) continue;
        else if (c == '0' && at + 1 < line.size() && line[at + 1] == 'x') {
            while (at + 1 < line.size() &&
                   (std::isxdigit(static_cast<unsigned char>(line[at + 1])) != 0 || line[at + 1] == 'x'))
                ++at;
        } else {
            key += c;
        }
    }
    return key;
}

/// The line without the place of the wait, where the kernel names the system call too: it hides the place
/// until the scheduler has taken a sleeping thread off its queue.
std::string without_place(std::string_view line) {
    const std::size_t begin = line.find(", waits in "), end = line.find(", system call ");
    if (begin == std::string_view::npos || end == std::string_view::npos) return std::string(line);
    return std::string(line.substr(0, begin)).append(line.substr(end));
}

/// True for a line that names a thread or process: "Thread 4171 (idle)", "Thread 1 (Thread 0x7f.. (LWP 7)
/// "x"):", "TID 7:", "Process 7: python ...".
bool is_heading(std::string_view line) {
    for (const std::string_view start : {"Thread ", "TID ", "PID ", "Process ", "Python v", "thread "}) {
        if (trim(line).starts_with(start)) return true;
    }
    return false;
}

std::string stack_key(const RankStack& stack) {
    std::string key(describe(stack.method));
    for (const std::string_view line : lines_of(stack))
        key += '\n' + (is_heading(line) ? "thread" : frame_key(without_place(line)));
    return key;
}

}  // namespace

void describe(Visitor& v, RankStack& stack) {
    v("rank", stack.rank);
    v("host", stack.host);
    v("pid", stack.pid);
    v.choice("method", stack.method, kStackMethods);
    v("text", stack.text);
}

std::string render_stacks(const std::vector<RankStack>& stacks) {
    std::map<std::string, std::vector<int>> alike;
    for (const RankStack& stack : stacks) alike[stack_key(stack)].push_back(stack.rank);
    std::string text;
    for (const RankStack& stack : stacks) {
        const std::vector<int>& ranks = alike[stack_key(stack)];
        if (ranks.front() != stack.rank) continue;
        const std::string where = stack.host.empty() ? "" : " on " + stack.host;
        text +=
            fmt::format("rank {}{} (pid {}), by {}", stack.rank, where, stack.pid, describe(stack.method));
        const std::vector<int> others(ranks.begin() + 1, ranks.end());
        if (!others.empty())
            text += fmt::format("; rank{} {} stand{} alike", others.size() == 1 ? "" : "s",
                                format_ranges(others), others.size() == 1 ? "s" : "");
        text += ":\n";
        for (const std::string_view line : lines_of(stack)) text += fmt::format("    {}\n", line);
    }
    return text;
}

}  // namespace ddprun
