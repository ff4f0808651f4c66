#include "ddp/ddp.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "ddp/cuda/host_copies.h"
#include "ddp/reduce/flat_layout.h"
#include "ddp/reduce/loops.h"
#include "ddp/reduce/reducer.h"
#include "ddp/reduce/tensor_broadcast.h"
#include "env/hmac.h"
#include "env/io/socket.h"
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

/// The first difference of `theirs` (rank r's description) from rank 0's.
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
    // Every rank has seen the difference, so all take part in showing it.
    const std::vector<std::string> all = group.all_gather_bytes(mine);
    for (std::size_t r = 1; r < all.size(); ++r) {
        if (all[r] != all[0]) throw MismatchError(first_difference(r, all[r], all[0]));
    }
}

DistributedDataParallel::DistributedDataParallel(ProcessGroup& group, std::vector<Tensor> parameters,
                                                 DdpOptions options)
    : DistributedDataParallel(std::move(options)) {
    attach_group(group, std::move(parameters), nullptr);
    if (!options_.broadcast_parameters) return;
    DistributedDataParallel::broadcast_parameters(0);
    broadcast_buffers(0);
}

DistributedDataParallel::DistributedDataParallel(DdpOptions options) : options_(std::move(options)) {}

void DistributedDataParallel::attach_group(ProcessGroup& group, std::vector<Tensor> parameters,
                                           std::unique_ptr<const ReductionPlan> plan) {
    group_ = group;
    parameters_ = std::move(parameters);
    check_tensors(state());
    check_parameters(parameters_);
    verify_same_tensors(group, state());
    if (parameters_.empty()) throw InvalidInput("the model has no parameter to train");
    reducer_ = std::make_unique<Reducer>(group, parameters_, options_.reducer, std::move(plan));
    if (!options_.buffers.empty())
        buffer_broadcast_ = std::make_unique<TensorBroadcast>(group, options_.buffers);
    last_pass_synchronised_ = true;
}

DistributedDataParallel::~DistributedDataParallel() = default;

std::vector<Tensor> DistributedDataParallel::state() const {
    std::vector<Tensor> all = parameters_;
    all.insert(all.end(), options_.buffers.begin(), options_.buffers.end());
    return all;
}

Reducer& DistributedDataParallel::reducer() const {
    if (!reducer_) throw Error("the model has no group yet: call attach() first");
    return *reducer_;
}

Buffer DistributedDataParallel::gradient(std::size_t parameter) const {
    return reducer().gradient(parameter);
}
std::vector<Buffer> DistributedDataParallel::gradients() const { return reducer().gradients(); }
void DistributedDataParallel::zero_gradients() { reducer().zero_gradients(); }
bool DistributedDataParallel::is_accumulating() const { return reducer().accumulating(); }
void DistributedDataParallel::request_stop() { reducer().request_stop(); }
bool DistributedDataParallel::stop_requested() const { return reducer().stop_requested(); }
bool DistributedDataParallel::carries_stop() const { return reducer().carries_stop(); }
void DistributedDataParallel::set_hook(CommunicationHook hook) { reducer().set_hook(std::move(hook)); }
bool DistributedDataParallel::is_used(std::size_t parameter) const { return reducer().is_used(parameter); }
const BucketPlan& DistributedDataParallel::plan() const { return reducer().plan(); }
const ReducerStatistics& DistributedDataParallel::statistics() const { return reducer().statistics(); }

DistributedDataParallel::NoSync::NoSync(Reducer& reducer, bool accumulate)
    : reducer_(&reducer), before_(reducer.accumulating()) {
    reducer.set_accumulating(before_ || accumulate);
}

DistributedDataParallel::NoSync::~NoSync() {
    if (reducer_ != nullptr) reducer_->set_accumulating(before_);
}

void DistributedDataParallel::broadcast_parameters(int root) {
    TensorBroadcast(*group_, parameters_).run(root);
}

void DistributedDataParallel::require_open_pass() const {
    if (join_ != nullptr && !join_->pass_is_open_)
        throw Error(fmt::format(
            "rank {}: call begin_forward() before each pass inside a Join: ranks without batches learn "
            "from it that there is one",
            group_->rank()));
}

void DistributedDataParallel::mark_ready(std::size_t parameter) {
    require_open_pass();
    reducer().mark_ready(parameter);
}

void DistributedDataParallel::mark_all_ready() {
    require_open_pass();
    reducer().mark_all_ready();
}

void DistributedDataParallel::finish() {
    reducer().finish();
    if (join_ != nullptr) {
        join_->pass_is_open_ = false;
        return;
    }
    if (options_.verify_every > 0 && !reducer_->accumulating() &&
        statistics().steps % options_.verify_every == 0)
        verify_by_majority();
}

void DistributedDataParallel::begin_forward() {
    if (join_ != nullptr) return join_->begin_forward();
    if (options_.broadcast_buffers && last_pass_synchronised_) broadcast_buffers();
    last_pass_synchronised_ = !reducer().accumulating();
}

void DistributedDataParallel::broadcast_buffers(int root) {
    if (buffer_broadcast_) buffer_broadcast_->run(root);
}

namespace {

std::string_view contents_of(const Tensor& tensor) {
    return {static_cast<const char*>(tensor.memory.data), tensor.memory.bytes()};
}

/// Every rank has seen a difference, so all take part in finding the first tensor that differs.
std::string first_different(ProcessGroup& group, std::span<const Tensor> tensors) {
    constexpr std::size_t kDigest = 64;
    std::string mine;
    for (const Tensor& tensor : tensors) {
        const std::string_view contents = contents_of(tensor);
        mine += ddprun::to_hex(ddprun::sha256({&contents, 1}));
    }
    const std::vector<std::string> all = group.all_gather_bytes(mine);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto digest = [&](const std::string& of_rank) {
            return std::string_view(of_rank).substr(i * kDigest, kDigest);
        };
        if (std::any_of(all.begin(), all.end(),
                        [&](const std::string& of_rank) { return digest(of_rank) != digest(all[0]); }))
            return fmt::format("'{}' ({})", tensors[i].name, describe(tensors[i]));
    }
    return "none any more";
}

/// "ranks 1, 3 on node01, node02".
std::string with_hosts(ProcessGroup& group, const std::vector<int>& ranks) {
    const std::vector<std::string> all = group.all_gather_bytes(ddprun::host_name());
    std::vector<std::string> hosts;
    for (const int rank : ranks) hosts.push_back(all[static_cast<std::size_t>(rank)]);
    hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
    return fmt::format("rank{} {} on {}", ranks.size() == 1 ? "" : "s", ddprun::format_ranges(ranks),
                       ddprun::join(hosts, ", "));
}

}  // namespace

void DistributedDataParallel::verify_by_majority() {
    wait_for_parameters();
    const cuda::HostCopies copies(parameters_, cuda::HostCopies::Begin::WithContents);
    std::uint64_t hash = 0;
    for (const Tensor& tensor : copies.tensors()) hash = hash_of(contents_of(tensor), hash);
    const std::string mine(reinterpret_cast<const char*>(&hash), sizeof hash);
    const std::vector<std::string> all = group_->all_gather_bytes(mine);
    // More than half of the ranks have the one in the middle, if any value is that of more than half.
    std::vector<std::string> sorted = all;
    std::ranges::nth_element(sorted, sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2));
    const std::string& majority = sorted[sorted.size() / 2];
    std::vector<int> outside;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank] != majority) outside.push_back(static_cast<int>(rank));
    }
    if (outside.empty()) return;
    const std::string different = first_different(*group_, copies.tensors());
    const std::string where = with_hosts(*group_, outside);
    const std::size_t others = all.size() - outside.size();
    if (2 * others <= all.size())
        throw MismatchError(fmt::format(
            "parameters are not bitwise equal after {} steps, and no more than {} of {} ranks agree, so that the "
            "right ones are not known; the first that differs is {}",
            statistics().steps, others, all.size(), different));
    const std::string what = fmt::format(
        "parameters of {} are not bitwise equal to those of the other {} ranks after {} steps; the first "
        "that differs is {}",
        where, others, statistics().steps, different);
    if (mine != majority) throw MismatchError(what);
    group_->barrier().wait();  // which the others do not reach: their processes end
}

std::string DistributedDataParallel::verify_equal_parameters() {
    wait_for_parameters();
    const cuda::HostCopies copies(parameters_, cuda::HostCopies::Begin::WithContents);
    std::vector<std::string_view> contents;
    for (const Tensor& parameter : copies.tensors()) contents.push_back(contents_of(parameter));
    const std::vector<std::string> all = group_->all_gather_bytes(ddprun::to_hex(ddprun::sha256(contents)));
    std::vector<int> different;
    for (std::size_t r = 1; r < all.size(); ++r) {
        if (all[r] != all[0]) different.push_back(static_cast<int>(r));
    }
    if (!different.empty())
        throw MismatchError(fmt::format(
            "parameters on rank {} are not bitwise equal to rank 0's after {} steps; the first that "
            "differs is {}",
            ddprun::format_ranges(different), statistics().steps,
            first_different(*group_, copies.tensors())));
    return all[0];
}

}  // namespace ddp
