#include "launcher/tools/batch/batch.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostSiteBytes = 64 * 1024;
constexpr int kMostPerNode = 100'000;

const SiteProfile* built_in(std::string_view name) {
    const auto& sites = built_in_sites();
    const auto found =
        std::find_if(sites.begin(), sites.end(), [&](const SiteProfile& site) { return site.name == name; });
    return found == sites.end() ? nullptr : &*found;
}

std::string names_of_built_in() {
    return join(built_in_sites(), ", ", [](const SiteProfile& site) { return site.name; });
}

Status take_line(const Json& value, std::string& into) {
    const Result<std::string> text = as<std::string>(value);
    if (!text || text->find('\n') != std::string::npos) return Error::invalid("expected a text of one line");
    into = *text;
    return {};
}

Status take_word(const Json& value, std::string& into) {
    if (const Status taken = take_line(value, into); !taken || is_directive_word(into)) return taken;
    return Error::invalid(fmt::format("'{}' cannot stand in a directive", excerpt(into)));
}

Status take_lines(const Json& value, std::vector<std::string>& into) {
    std::vector<std::string> lines;
    for (const Json& one : elements(value)) {
        if (!take_line(one, lines.emplace_back()))
            return Error::invalid("expected a list of texts, each one line");
    }
    if (!value.is_array()) return Error::invalid("expected a list of texts");
    into = std::move(lines);
    return {};
}

Status take_environment(const Json& value, std::vector<std::pair<std::string, std::string>>& into) {
    if (!value.is_object()) return Error::invalid("expected an object of texts");
    into.clear();
    for (const auto& [name, one] : members(value)) {
        const Result<std::string> text = as<std::string>(one);
        if (!text) return Error::invalid(fmt::format("{}: expected a text", name));
        if (!is_variable_name(name))
            return Error::invalid(fmt::format("'{}' is no name of a variable", excerpt(name)));
        into.emplace_back(name, *text);
    }
    return {};
}

Status take_count(const Json& value, int& into) {
    const Result<int> count = as<int>(value);
    if (!count || *count < 0 || *count > kMostPerNode)
        return Error::invalid(fmt::format("expected a number from 0 to {}", kMostPerNode));
    into = *count;
    return {};
}

Status take_field(const std::string& name, const Json& value, SiteProfile& site) {
    if (name == "like") return {};  // read before
    if (name == "name") return take_line(value, site.name);
    if (name == "cpus_per_node") return take_count(value, site.cpus_per_node);
    if (name == "gpus_per_node") return take_count(value, site.gpus_per_node);
    if (name == "memory") return take_word(value, site.memory);
    if (name == "queue") return take_word(value, site.queue);
    if (name == "place") return take_word(value, site.place);
    if (name == "select") return take_word(value, site.select);
    if (name == "filesystems") return take_word(value, site.filesystems);
    if (name == "keep") return take_word(value, site.keep);
    if (name == "gpu_type") return take_word(value, site.gpu_type);
    if (name == "modules") return take_lines(value, site.modules);
    if (name == "environment") return take_environment(value, site.environment);
    if (name == "setup") return take_lines(value, site.setup);
    if (name == "directives") return take_lines(value, site.directives);
    return Error::invalid("unknown field (docs/batch.md lists them)");
}

}  // namespace

bool is_directive_word(std::string_view text) {
    constexpr std::string_view kSpecial = "'\"\\#`$";
    return std::all_of(text.begin(), text.end(), [&](char c) {
        return std::isgraph(static_cast<unsigned char>(c)) != 0 && kSpecial.find(c) == std::string_view::npos;
    });
}

bool is_variable_name(std::string_view name) {
    const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
    return !name.empty() && std::isdigit(static_cast<unsigned char>(name.front())) == 0 &&
           std::all_of(name.begin(), name.end(), is_part);
}

const std::vector<SiteProfile>& built_in_sites() {
    static const SiteProfile derecho{.name = "derecho",
                                     .scheduler = Scheduler::Pbs,
                                     .cpus_per_node = 64,
                                     .gpus_per_node = 4,
                                     .memory = "480GB",
                                     .queue = "main",
                                     .modules = {"cuda"},
                                     .setup = {"module reset"}};
    static const SiteProfile polaris{.name = "polaris",
                                     .scheduler = Scheduler::Pbs,
                                     .gpus_per_node = 4,
                                     .queue = "prod",
                                     .place = "scatter",
                                     .select = "system=polaris",
                                     .filesystems = "home:eagle"};
    static const std::vector<SiteProfile> sites = {{}, derecho, polaris};
    return sites;
}

Result<SiteProfile> parse_site(std::string_view json) {
    const Result<Json> parsed = parse_json(json, {.comments = true, .unique_names = true});
    if (!parsed) return parsed.error();
    if (!parsed->is_object()) return Error::invalid("expected an object");
    SiteProfile site;
    if (parsed->contains("like")) {
        const SiteProfile* base = built_in(text_of(*parsed, "like"));
        if (base == nullptr)
            return Error::invalid(fmt::format("like: expected one of {}", names_of_built_in()));
        site = *base;
        site.scheduler.reset();  // a file may be of another machine
    }
    for (const auto& [name, value] : members(*parsed)) {
        if (const Status taken = take_field(name, value, site); !taken) return taken.error().with(name);
    }
    return site;
}

Result<SiteProfile> find_site(const std::string& word) {
    if (word.find('/') == std::string::npos && !word.ends_with(".json")) {
        if (const SiteProfile* site = built_in(word)) return *site;
        return Error::invalid(fmt::format("'{}': there is no such site (expected {}, or a FILE.json)",
                                          excerpt(word), names_of_built_in()));
    }
    const Result<std::string> text = read_regular_file(word, kMostSiteBytes);
    if (!text) return text.error();
    Result<SiteProfile> site = parse_site(*text);
    if (!site) return site.error().with(word);
    return site;
}

std::string default_site(const std::optional<std::string>& ddprun_site,
                         const std::vector<std::string>& files) {
    if (ddprun_site && !ddprun_site->empty()) return *ddprun_site;
    const auto exists = [](const std::string& file) { return ::access(file.c_str(), F_OK) == 0; };
    const auto found = std::find_if(files.begin(), files.end(), exists);
    return found == files.end() ? "generic" : *found;
}

}  // namespace ddprun
