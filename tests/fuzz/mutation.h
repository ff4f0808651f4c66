#pragma once

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "env/unique_fd.h"

/// What the fuzz programs share: changes to well-formed texts, from a fixed seed, and what must hold whatever
/// is read.
namespace ddprun::test {

[[noreturn]] inline void broken(std::string_view claim, std::string_view text) {
    fmt::print(stderr, "fuzz: {}: {}\n", claim, text);
    std::abort();
}

/// An error is for people: one line that fits on a screen, whatever the text was that is quoted in it.
inline void check_error(std::string_view what) {
    constexpr std::size_t kMostBytes = 500;
    if (what.empty()) broken("an error without words", what);
    if (what.size() >= kMostBytes) broken("an error that is longer than a few lines", what);
    if (what.find('\n') != std::string_view::npos) broken("an error of several lines", what);
}

/// One small change, of the kinds that find most: a bit, a byte, a cut, a repetition, another seed,
/// punctuation, a number at an edge, a long run.
inline void mutate(std::string& bytes, const std::vector<std::string>& all, std::mt19937& random) {
    static constexpr std::string_view kEdges[] = {"-1",
                                                  "1e400",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "9223372036854775808",
                                                  "4294967296",
                                                  "1.5",
                                                  "null",
                                                  "true",
                                                  "\"\"",
                                                  "[]",
                                                  "{}",
                                                  "\\u0000",
                                                  "\n"};
    const auto below = [&](std::size_t bound) { return bound == 0 ? 0 : random() % bound; };
    const std::size_t at = below(bytes.size());
    switch (random() % 8) {
        case 0:
            if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << (random() % 8));
            break;
        case 1:
            if (!bytes.empty()) bytes[at] = static_cast<char>(random());
            break;
        case 2: bytes.resize(at); break;
        case 3: bytes.insert(at, bytes.substr(at, below(32))); break;
        case 4: bytes += all[below(all.size())]; break;
        case 5: bytes.insert(at, kEdges[below(std::size(kEdges))]); break;
        case 6:
            if (random() % 8 == 0) bytes.insert(at, 1000, bytes.empty() ? '[' : bytes[at]);
            break;
        default: bytes.insert(at, 1, R"({}[]",:-0.e\)"[random() % 13]); break;
    }
}

inline void mutate_some(std::string& bytes, const std::vector<std::string>& all, std::mt19937& random) {
    for (auto changes = random() % 4; changes > 0; --changes) mutate(bytes, all, random);
}

/// A file that is read by its path and lies in no file system: ten thousand small writes to a disk take a
/// minute.
class MemoryFile {
  public:
    MemoryFile()
        : fd_(::memfd_create("fuzz", MFD_CLOEXEC)), path_(fmt::format("/proc/self/fd/{}", fd_.get())) {}
    [[nodiscard]] const std::string& path() const { return path_; }
    void write(std::string_view bytes) const {
        const bool written =
            ::ftruncate(fd_.get(), 0) == 0 &&
            ::pwrite(fd_.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
        if (!written) broken("a file in memory cannot be written", path_);
    }

  private:
    UniqueFd fd_;
    std::string path_;
};

}  // namespace ddprun::test
