#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "env/io/proc.h"
#include "env/text.h"
#include "tests/support/comes.h"

namespace ddprun::test {

/// How often `piece` occurs in `text`.
inline int occurrences(const std::string& text, const std::string& piece) {
    int n = 0;
    for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
    return n;
}

inline std::string file_content(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// Contents of all files below a log directory, by "attempt/rank/name" ("attempt_0/3/stdout.log").
inline std::map<std::string, std::string> log_files(const std::string& directory) {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
        if (!entry.is_regular_file()) continue;
        const auto job = *std::filesystem::relative(entry.path(), directory).begin();
        files[std::filesystem::relative(entry.path(), std::filesystem::path(directory) / job)] =
            file_content(entry.path());
    }
    return files;
}

enum class Stopped { Yes, No };
/// Waits until the process is, or is no longer, stopped by a signal; false after a timeout.
inline bool is_soon(Stopped wanted, pid_t pid) {
    const auto is_so = [&] {
        const bool is_stopped = proc_stat_of(pid).value_or(ProcStat{}).state == 'T';
        return is_stopped == (wanted == Stopped::Yes);
    };
    return comes(is_so, std::chrono::seconds(20));
}

/// The lines of a text, sorted: ranks write in any order.
inline std::vector<std::string> sorted_lines(const std::string& text) {
    std::vector<std::string> lines;
    for (const std::string_view line : split(text, '\n')) {
        if (!line.empty()) lines.emplace_back(line);
    }
    std::sort(lines.begin(), lines.end());
    return lines;
}

}  // namespace ddprun::test
