#pragma once

#include <string>
#include <string_view>

#include "data.h"
#include "env/result.h"

namespace train {

/// Reads rows of numbers with the class in the last column, separated by commas, semicolons (then decimal
/// commas are allowed) or tabs, as in the first line. Numbers and words may be quoted; lines that begin with
/// '#' and a first line without numbers are skipped. Classes are whole numbers from 0, or words, which are
/// numbered in alphabetical order. Error: InvalidArgument naming file, line and fault.
ddprun::Result<Samples> read_csv(const std::string& path, std::string_view content);

}  // namespace train
