#include "launcher/wrap.h"

#include "env/text.h"

namespace ddprun {

std::string wrap(std::string_view text, std::size_t width, std::size_t indent) {
    std::string out;
    std::size_t column = indent;  // the caller has already moved to the indent on the first line
    bool fresh = true;
    for (const std::string_view word : split(text, ' ')) {
        if (word.empty()) continue;
        if (!fresh && column + 1 + word.size() > width) {
            out += '\n';
            out.append(indent, ' ');
            column = indent;
            fresh = true;
        }
        if (!fresh) {
            out += ' ';
            ++column;
        }
        out += word;
        column += word.size();
        fresh = false;
    }
    return out;
}

}  // namespace ddprun
