#include "tests/support/fake_nccl/fault.h"

#include <cstdlib>
#include <sstream>

namespace fake {

namespace {

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> pieces;
    std::istringstream stream(text);
    for (std::string piece; std::getline(stream, piece, separator);) pieces.push_back(piece);
    return pieces;
}

}  // namespace

std::vector<Fault> faults_from_environment() {
    const char* text = std::getenv("FAKE_NCCL");
    std::vector<Fault> faults;
    for (const std::string& entry : split(text != nullptr ? text : "", ',')) {
        const std::vector<std::string> parts = split(entry, ':');
        if (parts.size() < 3) std::abort();  // the test is wrong
        faults.push_back(
            {std::stoi(parts[0]), parts[1], parts[2], parts.size() > 3 ? std::stoi(parts[3]) : 0});
    }
    return faults;
}

std::optional<Fault> find(const std::vector<Fault>& faults, int rank, const std::string& where) {
    for (const Fault& fault : faults) {
        if (fault.rank == rank && fault.where == where) return fault;
    }
    return std::nullopt;
}

}  // namespace fake
