#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "env/json.h"
#include "env/text.h"
#include "tests/support/comes.h"
#include "tests/support/run_program.h"
#include "tests/system/look.h"

namespace ddprun::test {

/// Whether the PBS whose commands are on PATH is to be tried, in place of the fake.
inline bool wants_real_pbs() { return std::getenv("DDPRUN_TEST_PBS") != nullptr; }

/// For it: a directory of this test in the home directory.
inline RunOptions real_pbs() {
    RunOptions options;
    options.directory = std::string(std::getenv("HOME")) + "/" + unique_name("ddprun-test-pbs");
    std::filesystem::create_directory(options.directory);
    return options;
}

/// Somebody with a directory that all hosts of a PBS see, who submits jobs and looks at them.
class PbsUser {
  public:
    /// `options`: where the commands are found, and the directory.
    explicit PbsUser(RunOptions options) : options_(std::move(options)) {}

    [[nodiscard]] const std::string& directory() const { return options_.directory; }
    [[nodiscard]] std::string file(const std::string& name) const { return directory() + "/" + name; }

    Outcome run(std::vector<std::string> command, const std::string& input = "") const {
        RunOptions options = options_;
        options.input = input;
        command.insert(command.begin(), "env");  // looks for it on the PATH of the options
        return test::run(command, options);
    }

    /// The id of a job with this script; its output is in `out` of the directory. Throws what qsub says.
    std::string submit(const std::string& script, const std::vector<std::string>& arguments = {}) const {
        std::ofstream(file("job.sh")) << "#!/bin/bash\ncd $PBS_O_WORKDIR\n" << script << "\n";
        std::vector<std::string> command{"qsub", "-j", "oe", "-o", file("out")};
        command.insert(command.end(), arguments.begin(), arguments.end());
        command.push_back("job.sh");
        const Outcome outcome = run(command);
        if (outcome.status != 0) throw std::runtime_error("qsub: " + outcome.err);
        return std::string(trim(outcome.out));
    }

    /// What qstat tells of a job, also of a finished one.
    [[nodiscard]] Json status(const std::string& id) const {
        const Json told = parse_json(run({"qstat", "-x", "-f", "-F", "json", id}).out).value_or(Json());
        return member(member(told, "Jobs"), id);
    }

    /// The same, once the job has this state; null when that does not come.
    [[nodiscard]] Json await_state(const std::string& id, const std::string& state) const {
        Json job;
        const bool has_come = comes([&] {
            job = status(id);
            return text_of(job, "job_state") == state;
        });
        return has_come ? job : Json();
    }

    /// The output of a job that has ended.
    [[nodiscard]] std::string output_of(const std::string& id) const {
        (void)await_state(id, "F");
        return file_content(file("out"));
    }

    /// Waits for a file that the job makes; false when it does not come.
    [[nodiscard]] bool await_file(const std::string& name) const {
        return comes([&] { return std::filesystem::exists(file(name)); });
    }
    /// The same for what a job writes that was submitted with -k doe: others' output comes at their end.
    [[nodiscard]] bool await_output(const std::string& text) const {
        return comes([&] { return file_content(file("out")).find(text) != std::string::npos; });
    }

  private:
    /// A real PBS has polls of up to two minutes.
    template <class Condition>
    static bool comes(const Condition& is_so) {
        return test::comes(is_so, std::chrono::minutes(wants_real_pbs() ? 5 : 1));
    }

    const RunOptions options_;
};

}  // namespace ddprun::test
