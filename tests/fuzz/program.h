#pragma once

#include <random>
#include <string>
#include <string_view>
#include <vector>

/// What a program of program.cpp defines, which mutates well-formed texts and has them taken.
namespace ddprun::test {

extern const int kIterations;
/// Aborts when something does not hold that must, whatever the bytes are.
void take(std::string_view bytes);
/// Well-formed texts. They are taken as they are before the first mutation.
std::vector<std::string> seeds();
/// The text of one iteration.
std::string mutated(const std::vector<std::string>& all, int iteration, std::mt19937& random);

}  // namespace ddprun::test
