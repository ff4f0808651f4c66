#pragma once

#include <fstream>
#include <sstream>
#include <string>

#include "env/json.h"

namespace ddprun::test {

/// Null if the file is absent or is not JSON.
inline Json json_file(const std::string& path) {
    std::stringstream content;
    content << std::ifstream(path).rdbuf();
    return parse_json(content.str()).value_or(Json());
}

}  // namespace ddprun::test
