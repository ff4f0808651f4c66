#include "tests/fuzz/program.h"

#include <fmt/core.h>

#include <cstdint>

/// With libFuzzer (clang++ -fsanitize=fuzzer -DDDPRUN_LIBFUZZER) an endless search; without, a fixed number
/// of mutations from a fixed seed, run as a test.
#ifdef DDPRUN_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    ddprun::test::take({reinterpret_cast<const char*>(data), size});
    return 0;
}

#else

int main() {
    using namespace ddprun::test;
    std::mt19937 random(20240229);
    const std::vector<std::string> all = seeds();
    for (const std::string& seed : all) take(seed);
    for (int i = 0; i < kIterations; ++i) take(mutated(all, i, random));
    fmt::print("fuzz: {} mutated texts taken\n", kIterations);
    return 0;
}

#endif
