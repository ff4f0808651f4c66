#pragma once

#include <fmt/core.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

namespace ddprun::test {

/// The runs of one fault.
struct Row {
    std::string fault;
    int runs = 0, equal = 0, refused = 0;
    std::string otherwise = {};  ///< the first run that ended in another way
};

inline void print_head() {
    fmt::print("{:<28} {:>6} {:>14} {:>18} {:>15}\n", "fault", "runs", "equal digest", "refused as stated",
               "anything else");
}

inline void print(const Row& row) {
    const int others = row.runs - row.equal - row.refused;
    fmt::print("{:<28} {:>6} {:>14} {:>18} {:>15}\n", row.fault, row.runs, row.equal, row.refused, others);
    if (others > 0) fmt::print("{}\n", row.otherwise);
}

inline std::string content_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline int occurrences(const std::string& text, const std::string& piece) {
    int n = 0;
    for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
    return n;
}

/// What train, or recovering, says of the weights that it ends with.
inline std::string digest_in(const std::string& out) {
    static const std::regex line(R"((sha256|digest) [0-9a-f]{64}.*)");
    std::smatch found;
    return std::regex_search(out, found, line) ? found.str() : "";
}

}  // namespace ddprun::test
