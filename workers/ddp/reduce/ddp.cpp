#include "ddp/ddp.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "ddp/cuda/host_copies.h"
#include "env/hmac.h"
#include "env/text.h"

namespace ddp {
namespace {

constexpr char kBetweenTensors = '\n';

std::string describe_all(std::span<const Tensor> tensors) {
    std::string text;
    for (const Tensor& tensor : tensors)
        text += fmt::format("'{}' ({}){}", tensor.name, describe(tensor), kBetweenTensors);
    return text;
}

/// How `theirs` (rank r's description) first differs from rank 0's.
std::string first_difference(std::size_t rank, std::string_view theirs, std::string_view zeros) {
    const auto a = ddprun::split(theirs, kBetweenTensors);
    const auto b = ddprun::split(zeros, kBetweenTensors);
    std::size_t i = 0;
    while (i < a.size() && i < b.size() && a[i] == b[i]) ++i;
    const auto item = [i](const auto& list) { return i + 1 < list.size() ? std::string(list[i]) : "none"; };
    std::string text = fmt::format("rank {}'s parameters differ from rank 0's: ", rank);
    // Each list ends with one empty piece.
    if (a.size() != b.size())
        text += fmt::format("{} parameters there, {} on rank 0; ", a.size() - 1, b.size() - 1);
    return text + fmt::format("parameter {} is {} there, {} on rank 0", i, item(a), item(b));
}

}  // namespace

void verify_same_tensors(ProcessGroup& group, std::span<const Tensor> tensors) {
    const std::string mine = describe_all(tensors);
    const std::string_view pieces[] = {mine};
    const std::vector<std::string> digests = group.all_gather_bytes(ddprun::to_hex(ddprun::sha256(pieces)));
    if (std::all_of(digests.begin(), digests.end(), [&](const auto& d) { return d == digests[0]; })) return;
    // Everyone has seen the difference, so everyone takes part in showing it.
    const std::vector<std::string> all = group.all_gather_bytes(mine);
    for (std::size_t r = 1; r < all.size(); ++r) {
        if (all[r] != all[0]) throw MismatchError(first_difference(r, all[r], all[0]));
    }
}

DistributedDataParallel::DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters,
                                                 DdpOptions options)
    : group_(group), parameters_(std::move(parameters)) {
    check_tensors(parameters_);
    verify_same_tensors(group_, parameters_);
    if (parameters_.empty()) throw InvalidInput("the model has no parameter to train");
    reducer_ = std::make_unique<Reducer>(group_, parameters_, std::move(options.reducer));
    if (!options.broadcast_parameters) return;
    std::vector<Work> works;
    for (const Tensor& parameter : parameters_) works.push_back(group_.broadcast(parameter.memory, 0));
    for (Work& work : works) work.wait();
}

std::string DistributedDataParallel::verify_equal_parameters() {
    const cuda::HostCopies copies(parameters_, cuda::HostCopies::Begin::WithContents);
    std::vector<std::string_view> contents;
    for (const Tensor& parameter : copies.tensors())
        contents.emplace_back(static_cast<const char*>(parameter.memory.data), parameter.memory.bytes());
    const std::vector<std::string> all = group_.all_gather_bytes(ddprun::to_hex(ddprun::sha256(contents)));
    std::vector<int> different;
    for (std::size_t r = 1; r < all.size(); ++r) {
        if (all[r] != all[0]) different.push_back(static_cast<int>(r));
    }
    if (!different.empty())
        throw MismatchError(fmt::format("parameters on rank {} are not bitwise equal to rank 0's",
                                        ddprun::format_ranges(different)));
    return all[0];
}

}  // namespace ddp
