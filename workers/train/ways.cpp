#include "ways.h"

#include <fmt/core.h>

#include <algorithm>

namespace train {
namespace {

const char* name_of(Task::What what) {
    switch (what) {
        case Task::What::Linear:
            return "linear (-, epilogue, kernel)";
        case Task::What::LinearWithRelu:
            return "linear with ReLU (mask, epilogue, kernel)";
        case Task::What::LinearGradients:
            return "gradient of weight and bias (epilogue, kernel)";
        case Task::What::InputGradient:
            return "gradient of input (-, kernel)";
        case Task::What::InputGradientByMask:
            return "gradient of input (mask, kernel)";
    }
    return "?";
}

/// The last way is the fastest, and not for want of another.
bool is_plain(const std::vector<double>& times) {
    return fastest(times) == times.size() - 1 &&
           std::any_of(times.begin(), times.end() - 1, [](double time) { return time != kNever; });
}

}  // namespace

const std::vector<double>* Ways::times(const Task& task, std::size_t ways, const Tuner::Run& run) {
    if (tuner_ == nullptr) return nullptr;
    const auto found = times_.find(task);
    if (found != times_.end()) return &found->second;
    if (!tuner_->may_time()) return nullptr;
    return &times_.emplace(task, tuner_->time(ways, run)).first->second;
}

std::size_t Ways::plain() const {
    return static_cast<std::size_t>(
        std::count_if(times_.begin(), times_.end(), [](const auto& task) { return is_plain(task.second); }));
}

std::vector<Timing> Ways::timings() const {
    std::vector<Timing> all;
    for (const auto& [task, times] : times_) {
        const Product::Kind& of = task.product;
        all.push_back(
            {fmt::format("{} {} x {} x {}", name_of(task.what), of.m, of.n, of.k), times, fastest(times)});
    }
    return all;
}

bool Ways::go(std::size_t preferred, std::size_t ways, const Tuner::Run& run) {
    if (run(preferred)) return true;
    for (std::size_t way = 0; way < ways; ++way) {
        if (way != preferred && run(way)) return true;
    }
    return false;
}

}  // namespace train
