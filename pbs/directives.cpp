#include "pbs/directives.h"

#include <fmt/core.h>

#include <string_view>

namespace ddprun::pbs {
namespace {

std::string chunks(const Directives& directives) {
    std::string text = fmt::format("{}", directives.nodes);
    if (!directives.select.empty()) text += ":" + directives.select;
    if (directives.cpus > 0) text += fmt::format(":ncpus={}", directives.cpus);
    if (directives.gpus > 0) text += fmt::format(":ngpus={}", directives.gpus);
    if (!directives.memory.empty()) text += fmt::format(":mem={}", directives.memory);
    return text;
}

}  // namespace

std::vector<std::string> render_directives(const Directives& directives) {
    std::vector<std::string> lines;
    const auto add = [&](std::string_view option, const std::string& value) {
        if (!value.empty()) lines.push_back(fmt::format("#PBS {}{}", option, value));
    };
    add("-N ", directives.name);
    add("-A ", directives.account);
    add("-q ", directives.queue);
    add("-l select=", chunks(directives));
    add("-l place=", directives.place);
    add("-l walltime=", directives.walltime);
    add("-l filesystems=", directives.filesystems);
    add("-j ", "oe");
    add("-k ", directives.keep);
    add("-o ", directives.output);
    if (directives.rerunnable) add("-r ", *directives.rerunnable ? "y" : "n");
    for (const std::string& one : directives.more) add("", one);
    return lines;
}

}  // namespace ddprun::pbs
