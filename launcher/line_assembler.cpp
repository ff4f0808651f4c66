#include "launcher/line_assembler.h"

#include <utility>

namespace ddprun {

std::string LineAssembler::take() {
    std::string line = std::exchange(partial_, {});
    if (std::exchange(continued_, false)) line.insert(0, kContinuedMark);
    return line;
}

std::string LineAssembler::cut() {
    // A progress bar draws over itself: what a terminal would show now is what follows the last return.
    const std::size_t drawn = partial_.rfind('\r');
    if (drawn != std::string::npos && drawn + 1 < partial_.size()) partial_.erase(0, drawn + 1);
    std::string line = take();
    continued_ = true;
    line += kUnfinishedMark;
    line += '\n';
    return line;
}

std::string LineAssembler::finish() {
    if (partial_.empty()) {
        continued_ = false;
        return "";
    }
    return take() + '\n';
}

}  // namespace ddprun
