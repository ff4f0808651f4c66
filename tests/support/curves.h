#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "env/json.h"
#include "tests/support/run_program.h"

namespace ddprun::test {

/// A directory of event files, read by read_curves.py, which shares nothing with the writer.
struct Curves {
    std::vector<std::string> files;
    std::map<std::string, std::vector<std::pair<std::uint64_t, double>>> points;  ///< by name: step and value

    [[nodiscard]] std::vector<std::uint64_t> steps(const std::string& name) const {
        std::vector<std::uint64_t> steps;
        const auto found = points.find(name);
        if (found == points.end()) return steps;
        for (const auto& [step, value] : found->second) steps.push_back(step);
        return steps;
    }
};

inline Curves read_curves(const std::string& directory) {
    const Outcome outcome = run({"python3", "-B", path_of("READ_CURVES"), directory});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Result<Json> json = parse_json_object(outcome.out);
    if (!json) return {};
    Curves curves;
    for (const auto& name : (*json)["files"]) curves.files.push_back(name.get<std::string>());
    for (const auto& [name, points] : (*json)["curves"].items()) {
        for (const auto& point : points)
            curves.points[name].emplace_back(
                point[0].get<std::uint64_t>(),
                point[1].is_string() ? std::stod(point[1].get<std::string>()) : point[1].get<double>());
    }
    return curves;
}

/// 1, 2, ..., last.
inline std::vector<std::uint64_t> steps_to(std::uint64_t last) {
    std::vector<std::uint64_t> steps;
    for (std::uint64_t step = 1; step <= last; ++step) steps.push_back(step);
    return steps;
}

}  // namespace ddprun::test
