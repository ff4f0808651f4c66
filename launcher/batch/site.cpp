#include "launcher/batch/site.h"

#include <fmt/core.h>

#include <algorithm>

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

Status take_lines(const Json& value, std::vector<std::string>& into) {
    std::vector<std::string> lines;
    for (const Json& one : value.elements()) {
        if (!one.is_text() || one.text().find('\n') != std::string::npos)
            return Error::invalid("expected a list of texts, each one line");
        lines.push_back(one.text());
    }
    if (!value.is_list()) return Error::invalid("expected a list of texts");
    into = std::move(lines);
    return {};
}

Status take_environment(const Json& value, std::vector<std::pair<std::string, std::string>>& into) {
    if (!value.is_object()) return Error::invalid("expected an object of texts");
    into.clear();
    for (const Json::Member& one : value.members()) {
        if (!one.value.is_text()) return Error::invalid(fmt::format("{}: expected a text", one.name));
        into.emplace_back(one.name, one.value.text());
    }
    return {};
}

Status take_count(const Json& value, int& into) {
    const std::optional<int> count = value.as_int();
    if (!count || *count < 0 || *count > kMostPerNode)
        return Error::invalid(fmt::format("expected a number from 0 to {}", kMostPerNode));
    into = *count;
    return {};
}

Status take_word(const Json& value, std::string& into) {
    if (!value.is_text() || value.text().find('\n') != std::string::npos)
        return Error::invalid("expected a text of one line");
    into = value.text();
    return {};
}

Status take_field(const Json::Member& field, SiteProfile& site) {
    if (field.name == "like") return {};  // read before
    if (field.name == "name") return take_word(field.value, site.name);
    if (field.name == "cpus_per_node") return take_count(field.value, site.cpus_per_node);
    if (field.name == "gpus_per_node") return take_count(field.value, site.gpus_per_node);
    if (field.name == "memory") return take_word(field.value, site.memory);
    if (field.name == "queue") return take_word(field.value, site.queue);
    if (field.name == "place") return take_word(field.value, site.place);
    if (field.name == "select") return take_word(field.value, site.select);
    if (field.name == "filesystems") return take_word(field.value, site.filesystems);
    if (field.name == "keep") return take_word(field.value, site.keep);
    if (field.name == "gpu_type") return take_word(field.value, site.gpu_type);
    if (field.name == "modules") return take_lines(field.value, site.modules);
    if (field.name == "environment") return take_environment(field.value, site.environment);
    if (field.name == "setup") return take_lines(field.value, site.setup);
    if (field.name == "directives") return take_lines(field.value, site.directives);
    return Error::invalid("unknown field (docs/batch.md lists them)");
}

}  // namespace

const std::vector<SiteProfile>& built_in_sites() {
    static const std::vector<SiteProfile> sites = {{},
                                                   {.name = "derecho",
                                                    .cpus_per_node = 64,
                                                    .gpus_per_node = 4,
                                                    .memory = "480GB",
                                                    .queue = "main",
                                                    .place = "",
                                                    .select = "",
                                                    .filesystems = "",
                                                    .keep = "doe",
                                                    .gpu_type = "",
                                                    .modules = {"cuda"},
                                                    .environment = {},
                                                    .setup = {"module reset"},
                                                    .directives = {}},
                                                   {.name = "polaris",
                                                    .cpus_per_node = 0,
                                                    .gpus_per_node = 4,
                                                    .memory = "",
                                                    .queue = "prod",
                                                    .place = "scatter",
                                                    .select = "system=polaris",
                                                    .filesystems = "home:eagle",
                                                    .keep = "doe",
                                                    .gpu_type = "",
                                                    .modules = {},
                                                    .environment = {},
                                                    .setup = {},
                                                    .directives = {}}};
    return sites;
}

Result<SiteProfile> parse_site(std::string_view json) {
    const Result<Json> parsed = parse_json(json, {.comments = true, .unique_names = true});
    if (!parsed) return parsed.error();
    if (!parsed->is_object()) return Error::invalid("expected an object");
    SiteProfile site;
    if (const Json* like = parsed->find("like")) {
        const SiteProfile* base = like->is_text() ? built_in(like->text()) : nullptr;
        if (base == nullptr)
            return Error::invalid(fmt::format("like: expected one of {}", names_of_built_in()));
        site = *base;
    }
    for (const Json::Member& field : parsed->members()) {
        if (const Status taken = take_field(field, site); !taken) return taken.error().with(field.name);
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

}  // namespace ddprun
