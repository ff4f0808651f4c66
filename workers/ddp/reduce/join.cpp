#include <fmt/core.h>

#include <string_view>
#include <vector>

#include "ddp/ddp.h"
#include "env/text.h"

namespace ddp {
namespace {

/// A rank that continued, or ended, without finish() is missed in the next exchange: the other ranks' error
/// says that it must call finish().
std::vector<std::string> gather_status(ProcessGroup& group, std::string_view mine) {
    constexpr std::string_view kRemedy =
        "; inside a Join each rank calls Join::finish() once it has no more batches";
    try {
        return group.all_gather_bytes(mine);
    } catch (const PeerLostError& error) {
        throw PeerLostError(fmt::format("{}{}", error.what(), kRemedy));
    } catch (const MismatchError& error) {
        throw MismatchError(fmt::format("{}{}", error.what(), kRemedy));
    }
}

}  // namespace

Join::Join(DistributedDataParallel& model, JoinOptions options) : model_(model), options_(options) {
    if (model_.join_ != nullptr) throw InvalidInput("the model is in a Join already: finish that one first");
    model_.check_join(true);
    model_.join_ = this;
    model_.group_->refuse_recovery("Join: ranks that have no batches left are at no common unit");
}

Join::~Join() {
    model_.join_ = nullptr;
    if (!model_.group_.is_gone()) model_.reducer_->set_active_ranks(model_.group_->size());
}

Join::JoinStatus Join::exchange_status(bool have_batches) {
    constexpr char kHasBatches = 1, kReduces = 2;
    std::string mine(1, '\0');
    if (have_batches)
        mine[0] = static_cast<char>(kHasBatches | (model_.reducer_->accumulating() ? 0 : kReduces));
    const std::vector<std::string> all = gather_status(*model_.group_, mine);
    JoinStatus status;
    std::vector<int> without;
    for (std::size_t r = 0; r < all.size(); ++r) {
        const int rank = static_cast<int>(r);
        if (all[r].at(0) == 0) {
            without.push_back(rank);
            continue;
        }
        ++status.active;
        status.last = rank;
        status.reduces = (all[r][0] & kReduces) != 0;
    }
    if (options_.throw_on_early_termination && !without.empty() && status.active > 0)
        throw Error(fmt::format(
            "rank {}: rank {} has no more batches, others have; give all the same number, or do without "
            "throw_on_early_termination",
            model_.group_->rank(), ddprun::format_ranges(without)));
    return status;
}

void Join::begin_forward() {
    begin_pass(exchange_status(true));
    pass_is_open_ = true;
}

void Join::begin_pass(const JoinStatus& status) {
    status_ = status;
    if (!options_.divide_by_initial_world_size) model_.reducer_->set_active_ranks(status.active);
    // Rank 0 may have no batches left; a rank that still trains has the newest buffers.
    if (model_.options_.broadcast_buffers && model_.last_pass_synchronised_)
        model_.broadcast_buffers(status.last);
    model_.last_pass_synchronised_ = status.reduces;
}

void Join::finish(const std::function<void()>& after_step) {
    model_.check_join(static_cast<bool>(after_step));
    for (JoinStatus status = exchange_status(false); status.active > 0; status = exchange_status(false)) {
        begin_pass(status);
        if (!status.reduces) continue;
        model_.reducer_->shadow_step();
        if (after_step) after_step();
    }
    model_.broadcast_parameters(status_.last);
    model_.broadcast_buffers(status_.last);
}

}  // namespace ddp
