#include "csv.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "env/text.h"

namespace train {
namespace {

using ddprun::Errc;
using ddprun::Error;
using ddprun::Result;
using ddprun::Status;
using Cells = std::vector<std::string_view>;

Error wrong_csv(const std::string& path, std::size_t line, std::string_view what) {
    return {Errc::InvalidArgument, fmt::format("{}: line {}: {}", path, line, what), 0};
}

/// The end, behind the quote, of the quoted text that begins `text`; npos without one.
std::size_t end_of_quoted(std::string_view text) {
    for (std::size_t at = text.find('"', 1); at != std::string_view::npos; at = text.find('"', at + 1)) {
        if (at + 1 == text.size() || text[at + 1] != '"') return at + 1;
        ++at;  // a doubled quote stands for one
    }
    return std::string_view::npos;
}

struct Cell {
    std::string_view text;
    std::size_t end;  ///< position of its separator, or end of the row
};

/// Error: a quote that does not end, or does not end its cell.
Result<Cell> cell_at(std::string_view row, std::size_t begin, char separator) {
    const std::size_t first = row.find_first_not_of(' ', begin);
    if (first == std::string_view::npos || row[first] != '"') {
        const std::size_t end = std::min(row.find(separator, begin), row.size());
        return Cell{ddprun::trim(row.substr(begin, end - begin)), end};
    }
    const std::size_t quoted = end_of_quoted(row.substr(first));
    if (quoted == std::string_view::npos) return Error{Errc::InvalidArgument, "a quote does not end", 0};
    const std::size_t behind = first + quoted, end = std::min(row.find(separator, behind), row.size());
    if (!ddprun::trim(row.substr(behind, end - behind)).empty())
        return Error{Errc::InvalidArgument, "something stands behind a quote", 0};
    return Cell{ddprun::trim(row.substr(first + 1, quoted - 2)), end};
}

Result<Cells> split_row(std::string_view row, char separator) {
    Cells cells;
    for (std::size_t at = 0;;) {
        const Result<Cell> cell = cell_at(row, at, separator);
        if (!cell) return cell.error();
        cells.push_back(cell->text);
        if (cell->end == row.size()) return cells;
        at = cell->end + 1;
    }
}

/// The separator of the file, from its first row.
char separator_of(std::string_view row) {
    for (const char candidate : {';', '\t'}) {
        bool is_quoted = false;
        for (const char c : row) {
            is_quoted = is_quoted != (c == '"');
            if (c == candidate && !is_quoted) return candidate;
        }
    }
    return ',';
}

/// With semicolons as separators "14,23" is a number.
Result<double> parse_number(std::string_view cell, char separator) {
    if (separator != ';' || cell.find('.') != std::string_view::npos) return ddprun::parse_double(cell);
    std::string with_point(cell);
    std::replace(with_point.begin(), with_point.end(), ',', '.');
    return ddprun::parse_double(with_point);
}

class Reader {
  public:
    explicit Reader(const std::string& path) : path_(path) { samples_.needs_scaling = true; }

    Status take(std::size_t line, std::string_view row) {
        if (!separator_) separator_ = separator_of(row);
        const Result<Cells> cells = split_row(row, *separator_);
        if (!cells) return wrong_csv(path_, line, cells.error().what);
        if (is_first_ && is_header(*cells)) return is_first_ = false, Status{};
        is_first_ = false;
        return take_cells(line, *cells);
    }

    Result<Samples> finish() && {
        const Status numbered = number_classes();
        if (!numbered) return numbered.error();
        return std::move(samples_);
    }

  private:
    struct Label {
        std::string_view text;
        std::size_t line;
    };

    bool is_header(const Cells& cells) const {
        return std::none_of(cells.begin(), cells.end(),
                            [&](auto cell) { return parse_number(cell, *separator_).has_value(); });
    }

    Status take_cells(std::size_t line, const Cells& cells) {
        if (cells.size() < 2) return wrong_csv(path_, line, "not CSV with values and a label");
        if (labels_.empty()) samples_.features = cells.size() - 1;
        if (cells.size() != samples_.features + 1)
            return wrong_csv(
                path_, line,
                fmt::format("{} columns, the lines before have {}", cells.size(), samples_.features + 1));
        for (std::size_t i = 0; i < samples_.features; ++i) {
            const Result<double> value = parse_number(cells[i], *separator_);
            if (!value || !std::isfinite(static_cast<float>(*value)))
                return wrong_csv(
                    path_, line,
                    fmt::format("column {}: '{}' is not a number", i + 1, ddprun::excerpt(cells[i])));
            samples_.values.push_back(static_cast<float>(*value));
        }
        labels_.push_back({cells.back(), line});
        return {};
    }

    Status number_classes() {
        for (const Label& label : labels_) {
            const Result<std::int64_t> number = ddprun::parse_int_between(label.text, 0, kMostClasses);
            if (!number) return number_words();
            samples_.labels.push_back(static_cast<std::int32_t>(*number));
        }
        return {};
    }

    Status number_words() {
        std::map<std::string_view, std::int32_t> numbers;
        for (const Label& label : labels_) {
            const Result<double> number = parse_number(label.text, *separator_);
            if (label.text.empty() || (number && *number != std::floor(*number)))
                return wrong_csv(path_, label.line,
                                 fmt::format("label: '{}' is no class: a whole number or a word",
                                             ddprun::excerpt(label.text)));
            numbers[label.text] = 0;
        }
        // A column with a class per sample is a name or a measurement, not a class.
        if (numbers.size() > kFewestWithWords && numbers.size() * 2 > labels_.size())
            return Error{
                Errc::InvalidArgument,
                fmt::format("{}: its last column has {} different words in {} rows: it has to be the class",
                            path_, numbers.size(), labels_.size()),
                0};
        std::int32_t next = 0;
        for (auto& [word, number] : numbers) number = next++;
        samples_.labels.clear();
        for (const Label& label : labels_) samples_.labels.push_back(numbers.at(label.text));
        return {};
    }

    static constexpr std::size_t kFewestWithWords = 10;
    const std::string& path_;
    Samples samples_;
    std::vector<Label> labels_;
    std::optional<char> separator_;
    bool is_first_ = true;
};

}  // namespace

Result<Samples> read_csv(const std::string& path, std::string_view content) {
    constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
    if (content.starts_with(kByteOrderMark)) content.remove_prefix(kByteOrderMark.size());
    Reader reader(path);
    for (std::size_t line = 1; !content.empty(); ++line) {
        const std::size_t end = std::min(content.find('\n'), content.size());
        const std::string_view row = ddprun::trim(content.substr(0, end));
        content.remove_prefix(std::min(end + 1, content.size()));
        if (row.empty() || row.front() == '#') continue;
        const Status taken = reader.take(line, row);
        if (!taken) return taken.error();
    }
    return std::move(reader).finish();
}

}  // namespace train
