#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

/// Reading what another ddprun said of a job. Seen by .cpp files only: this header costs a second to compile.
namespace ddprun::lenient {

using Json = nlohmann::ordered_json;

/// A key of the wrong type, or none, leaves the default: an older ddprun may have said less.
template <class T>
void take(const Json& json, const char* key, T& into) {
    const auto found = json.find(key);
    if (found == json.end()) return;
    if constexpr (std::is_same_v<T, std::string>) {
        if (found->is_string()) into = found->get<std::string>();
    } else if constexpr (std::is_same_v<T, bool>) {
        if (found->is_boolean()) into = found->get<bool>();
    } else {
        const bool fits = std::is_integral_v<T> ? found->is_number_integer() : found->is_number();
        if (fits) into = found->get<T>();
    }
}

template <class T>
void take_list(const Json& json, const char* key, std::vector<T>& into, T (*read)(const Json&)) {
    const auto list = json.find(key);
    if (list == json.end() || !list->is_array()) return;
    for (const Json& entry : *list) {
        if (entry.is_object()) into.push_back(read(entry));
    }
}

}  // namespace ddprun::lenient
