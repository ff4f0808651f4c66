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

/// True if the test uses the PBS whose commands are on PATH instead of the fake.
inline bool wants_real_pbs() { return std::getenv("DDPRUN_TEST_PBS") != nullptr; }

/// A directory of this test in the home directory, for that PBS.
inline RunOptions real_pbs() {
    RunOptions options;
    options.directory = std::string(std::getenv("HOME")) + "/" + unique_name("ddprun-test-pbs");
    std::filesystem::create_directory(options.directory);
    return options;
}

/// A user who submits jobs and queries them, with a directory that all hosts of the PBS see.
class PbsUser {
  public:
    /// `options` have the PATH of the commands and the directory.
    explicit PbsUser(RunOptions options) : options_(std::move(options)) {}

    [[nodiscard]] const std::string& directory() const { return options_.directory; }
    [[nodiscard]] std::string file(const std::string& name) const { return directory() + "/" + name; }

    Outcome run(std::vector<std::string> command, const std::string& input = "") const {
        RunOptions options = options_;
        options.input = input;
        command.insert(command.begin(), "env");  // searches the PATH of the options
        return test::run(command, options);
    }

    /// Submits a script and returns the job's id; its output is `out` in the directory. Throws qsub's
    /// message.
    std::string submit(const std::string& script, const std::vector<std::string>& arguments = {}) const {
        std::ofstream(file("job.sh")) << "#!/bin/bash\ncd $PBS_O_WORKDIR\n" << script << "\n";
        std::vector<std::string> command{"qsub", "-j", "oe", "-o", file("out")};
        command.insert(command.end(), arguments.begin(), arguments.end());
        command.push_back("job.sh");
        const Outcome outcome = run(command);
        if (outcome.status != 0) throw std::runtime_error("qsub: " + outcome.err);
        return std::string(trim(outcome.out));
    }

    /// The answer of qstat about a job, also a finished one.
    [[nodiscard]] Json status(const std::string& id) const {
        const Json told = parse_json(run({"qstat", "-x", "-f", "-F", "json", id}).out).value_or(Json());
        return member(member(told, "Jobs"), id);
    }

    /// The same, when the job has this state; null if it never has.
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
    /// The same for the output of a job that was submitted with -k doe; other jobs deliver theirs at the end.
    [[nodiscard]] bool await_output(const std::string& text) const {
        return comes([&] { return file_content(file("out")).find(text) != std::string::npos; });
    }

  private:
    /// A real PBS polls at intervals of up to two minutes.
    template <class Condition>
    static bool comes(const Condition& is_so) {
        return test::comes(is_so, std::chrono::minutes(wants_real_pbs() ? 5 : 1));
    }

    const RunOptions options_;
};

}  // namespace ddprun::test
