// The completion scripts in their shells, where these are installed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "env/text.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/terminal.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
using Words = std::vector<std::string>;

/// "" when it is not installed.
std::string path_of_shell(const std::string& name) {
    for (const char* directory : {"/usr/bin/", "/bin/", "/usr/local/bin/"}) {
        if (::access((directory + name).c_str(), X_OK) == 0) return directory + name;
    }
    return "";
}

/// zsh tells nobody what it would offer: a terminal of its own, and a compadd that says what it was given.
constexpr const char* kZshCapture = R"zsh(
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z "PROMPT=; setopt zle; fpath=($1 \$fpath); autoload -Uz compinit; compinit -D -u"
zpty -w z 'bindkey "^I" complete-word; over () { echo OVER; exit }; comppostfuncs=( over )'
zpty -w z 'compadd () { if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return $?; fi; typeset -a hits; builtin compadd -A hits "$@"; builtin compadd "$@"; local one; for one in $hits; do echo -E - "HIT:$one"; done }'
zpty -w z 'echo rea""dy'
zpty -r -m z line '*ready*'
zpty -w -n z "$2"$'\t'
while zpty -r z line; do print -r -- "$line"; [[ $line == *OVER* ]] && break; done
)zsh";

class Completion : public ::testing::Test {
  protected:
    void needs(const std::string& shell) {
        path_ = path_of_shell(shell);
        script_ = directory_.file("_ddprun");
        std::ofstream(script_) << run({path_of("DDPRUN"), "--print-completion", shell}).out;
        // As the shells find it: by its name, along PATH.
        std::filesystem::create_symlink(path_of("DDPRUN"), directory_.file("ddprun"));
    }
    [[nodiscard]] RunOptions options() const {
        RunOptions options = with_environment(
            {"HOME=" + directory_.path(), "PATH=" + directory_.path() + ":/usr/bin:/bin", "TERM=dumb"});
        options.directory = directory_.path();
        return options;
    }
    /// What fish offers for the last word of the line, without descriptions.
    Words fish(const std::string& line) {
        const Outcome outcome =
            run({path_, "-N", "-c", "source _ddprun; complete -C'" + line + "'"}, options());
        EXPECT_EQ(outcome.err, "");
        Words words;
        for (const std::string_view one : split(outcome.out, '\n')) {
            if (!one.empty()) words.emplace_back(one.substr(0, one.find('\t')));
        }
        return words;
    }
    Words zsh(const std::string& line) {
        std::ofstream(directory_.file("capture.zsh")) << kZshCapture;
        const Outcome outcome = run({path_, "-f", "capture.zsh", directory_.path(), line}, options());
        EXPECT_FALSE(outcome.timed_out) << outcome.out;
        Words words;
        for (std::string_view one : split(outcome.out, '\n')) {
            if (one.ends_with('\r')) one.remove_suffix(1);
            if (const std::size_t hit = one.find("HIT:"); hit != std::string_view::npos)
                words.emplace_back(one.substr(hit + 4));
        }
        return words;
    }

    /// What bash offers for the last of the words.
    Words bash(const std::string& line) {
        const Outcome outcome = run(
            {path_, "--norc", "-c",
             "source _ddprun; words=\"$1\"; COMP_WORDS=($words); [[ $words == *\" \" ]] && COMP_WORDS+=(\"\");"
             "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _ddprun; printf '%s\\n' \"${COMPREPLY[@]}\"",
             "bash", line},
            options());
        EXPECT_EQ(outcome.err, "");
        Words words;
        for (const std::string_view one : split(outcome.out, '\n')) {
            if (!one.empty()) words.emplace_back(one);
        }
        return words;
    }

    TemporaryDirectory directory_;
    std::string path_, script_;
};

TEST_F(Completion, BashOffersOptionsValuesSubcommandsAndTheirWords) {
    needs("bash");
    if (path_.empty()) GTEST_SKIP() << "bash is not installed";
    std::filesystem::create_directory(directory_.file("traces"));
    std::ofstream(directory_.file("train.py")) << "";
    EXPECT_THAT(bash("ddprun --nno"), ElementsAre("--nnodes"));
    EXPECT_THAT(bash("ddprun stac"), Contains("stacks"));
    EXPECT_THAT(bash("ddprun stacks --"), UnorderedElementsAre("--rank", "--job", "--help"));
    EXPECT_THAT(bash("ddprun trace "), ElementsAre("traces"));
    EXPECT_THAT(bash("ddprun trace --"), ElementsAre("--help"));
    EXPECT_THAT(bash("ddprun signal US"), UnorderedElementsAre("USR1", "USR2"));
    EXPECT_THAT(bash("ddprun pbs "), ElementsAre("script", "submit", "status"));
    EXPECT_THAT(bash("ddprun pbs script tr"), UnorderedElementsAre("traces", "train.py"));
    EXPECT_THAT(bash("ddprun slurm submit --site tr"), UnorderedElementsAre("traces", "train.py"));
    EXPECT_THAT(bash("ddprun ps "), IsEmpty());
    EXPECT_THAT(bash("ddprun --hostfile tr"), UnorderedElementsAre("traces", "train.py"));
    EXPECT_THAT(bash("ddprun --trace tr"), ElementsAre("traces"));
    EXPECT_THAT(bash("ddprun --numa-binding = no"), UnorderedElementsAre("none", "node"));
    EXPECT_THAT(bash("ddprun --nnodes 2 trai"), Contains("train.py"));
    EXPECT_THAT(bash("ddprun train.py --nno"), IsEmpty()) << "what follows the program is the program's";
}

TEST_F(Completion, FishOffersOptionsValuesSubcommandsAndTheirs) {
    needs("fish");
    if (path_.empty()) GTEST_SKIP() << "fish is not installed";
    EXPECT_THAT(fish("ddprun --nno"), ElementsAre("--nnodes"));
    EXPECT_THAT(fish("ddprun --numa-binding "),
                AllOf(Contains("node"), Contains("core-complex"), Not(Contains("ps"))));
    EXPECT_THAT(fish("ddprun --numa-binding=no"),
                UnorderedElementsAre("--numa-binding=node", "--numa-binding=none"));
    EXPECT_THAT(fish("ddprun stac"), Contains("stacks"));
    EXPECT_THAT(fish("ddprun stacks --"), UnorderedElementsAre("--rank", "--job", "--help"));
    EXPECT_THAT(fish("ddprun doctor --no"), ElementsAre("--no-run"));
    std::filesystem::create_directory(directory_.file("traces"));
    EXPECT_THAT(fish("ddprun trace tr"), ElementsAre("traces/"));
    EXPECT_THAT(fish("ddprun signal US"), UnorderedElementsAre("USR1", "USR2"));
    EXPECT_THAT(fish("ddprun pbs sc"), ElementsAre("script"));
    EXPECT_THAT(fish("ddprun pbs script tr"), ElementsAre("traces/"));
    EXPECT_THAT(fish("ddprun env --nno"), ElementsAre("--nnodes"));
    std::ofstream(directory_.file("train.py")) << "";
    EXPECT_THAT(fish("ddprun --hostfile trai"), ElementsAre("train.py"));
    EXPECT_THAT(fish("ddprun --hostfile=trai"), ElementsAre("--hostfile=train.py"));
    EXPECT_THAT(fish("ddprun train --data=trai"), ElementsAre("--data=train.py"));
    EXPECT_THAT(fish("ddprun --nnodes 2 --qui"), ElementsAre("--quiet"));
    EXPECT_THAT(fish("ddprun --nnodes 2 train --"), IsEmpty()) << "what follows the program is the program's";
}

TEST_F(Completion, ZshOffersOptionsValuesSubcommandsAndTheirs) {
    needs("zsh");
    if (path_.empty()) GTEST_SKIP() << "zsh is not installed";
    EXPECT_THAT(zsh("ddprun --nno"), ElementsAre("--nnodes"));
    EXPECT_THAT(zsh("ddprun --numa-binding no"), UnorderedElementsAre("none", "node"));
    EXPECT_THAT(zsh("ddprun stac"), Contains("stacks"));
    EXPECT_THAT(zsh("ddprun stacks --"), UnorderedElementsAre("--rank", "--job", "--help"));
    EXPECT_THAT(zsh("ddprun doctor --no"), ElementsAre("--no-run"));
    EXPECT_THAT(zsh("ddprun signal US"), UnorderedElementsAre("USR1", "USR2"));
    EXPECT_THAT(zsh("ddprun pbs sc"), ElementsAre("script"));
    std::filesystem::create_directory(directory_.file("traces"));
    EXPECT_THAT(zsh("ddprun trace tr"), Contains(StartsWith("traces")));
    EXPECT_THAT(zsh("ddprun env --nno"), ElementsAre("--nnodes"));
    std::ofstream(directory_.file("train.py")) << "";
    EXPECT_THAT(zsh("ddprun --hostfile trai"), Contains("train.py"));
    EXPECT_THAT(zsh("ddprun --hostfile=trai"), Contains("train.py"));
    EXPECT_THAT(zsh("ddprun --numa-binding=no"), UnorderedElementsAre("none", "node"));
    EXPECT_THAT(zsh("ddprun train --nno"), IsEmpty()) << "what follows the program is the program's";
}

TEST_F(Completion, TcshCompletesOptionsAndValues) {
    needs("tcsh");
    if (path_.empty()) GTEST_SKIP() << "tcsh is not installed";
    Terminal terminal({path_, "-f"}, 200);
    terminal.type("unset autologout; cd " + directory_.path() +
                  "; setenv PATH ${cwd}:/usr/bin:/bin; source " + script_ + "; echo so'ur'ced\n");
    ASSERT_TRUE(terminal.shows("sourced")) << terminal.screen();
    terminal.type("echo ddprun; ddprun --numa-bin\t");
    EXPECT_TRUE(terminal.shows("--numa-binding ")) << terminal.screen();
    terminal.type("core\t");
    EXPECT_TRUE(terminal.shows("core-complex ")) << terminal.screen();
    std::ofstream(directory_.file("some-hosts")) << "";
    terminal.type("--hostfile some\t");
    EXPECT_TRUE(terminal.shows("some-hosts ")) << terminal.screen();
}

}  // namespace
}  // namespace ddprun::test
