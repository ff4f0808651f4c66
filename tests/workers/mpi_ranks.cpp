// Every collective over backend "mpi": one process per rank, under a real mpiexec. Prints failures, and then
// exits with 1; rank 0 prints "N ranks, NAME: all is well".
//
//   mpi_ranks            everything that must work
//   mpi_ranks thread     the same, in the group's own thread
//   mpi_ranks progress FIFO  a test of that thread: calls proceed while the program computes
//   mpi_ranks forked [thread]  a forked child of each rank is refused every call, and exits
//   mpi_ranks uneven     rank 1 counts slices otherwise; all end with the exit code 1
//   mpi_ranks alone      rank 1 does not come to a barrier; the others end with the exit code 1
//   mpi_ranks killed     rank 1 kills itself while the others wait for it
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <fcntl.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "ddp/context.h"
#include "ddp/process_group.h"
#include "forked_child.h"
#include "reference_reduction.h"
#include "tests/support/half_float.h"

namespace {

using namespace ddp;
using reference::Bytes;
using reference::slice;
using enum Message::Direction;

using reference::kTypes;
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::Product};

int wrong = 0;

void expect(bool holds, const std::string& what) {
    if (holds) return;
    ++wrong;
    fmt::print(stderr, "wrong: {}\n", what);
}

Buffer whole(Bytes& bytes, DType type) { return {bytes.data(), bytes.size() / size_of(type), type, {}}; }

template <class T>
void put(Bytes& bytes, std::size_t index, T value) {
    std::memcpy(bytes.data() + index * sizeof value, &value, sizeof value);
}

/// Small whole numbers: their sums and products are exact in any order.
Bytes values_of(int rank, DType type, std::size_t count) {
    Bytes bytes(count * size_of(type));
    for (std::size_t i = 0; i < count; ++i) {
        const int value = 1 + (static_cast<int>(i) + rank) % 4;
        switch (type) {
            case DType::F32: put(bytes, i, static_cast<float>(value)); break;
            case DType::F64: put(bytes, i, static_cast<double>(value)); break;
            case DType::I32: put(bytes, i, value); break;
            case DType::I64: put(bytes, i, std::int64_t{value}); break;
            case DType::BF16: put(bytes, i, half_float::to_bf16(static_cast<float>(value))); break;
            case DType::F16: put(bytes, i, half_float::to_f16(static_cast<float>(value))); break;
            case DType::U8:
            case DType::I8: put(bytes, i, static_cast<std::uint8_t>(value)); break;
            case DType::Bool: put(bytes, i, static_cast<std::uint8_t>(value % 2)); break;
        }
    }
    return bytes;
}

struct Case {
    ProcessGroup& group;
    DType type;
    std::size_t count;
    std::vector<Bytes> inputs;  ///< by rank, `count` elements for each of the ranks
    [[nodiscard]] std::size_t ranks() const { return inputs.size(); }
    [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(group.rank()); }
    [[nodiscard]] std::size_t each() const { return count * size_of(type); }
    void expect_equal(const Bytes& got, const Bytes& expected, const char* call) const {
        expect(got == expected, fmt::format("rank {}: {} of {} {}", me(), call, count, name_of(type)));
    }
};

void reduces(const Case& with) {
    for (const ReduceOp op : kOps) {
        if (!is_reducible(with.type, op)) continue;
        const Bytes reduced = reference::reduce(with.inputs, with.type, op);
        Bytes mine = with.inputs[with.me()];
        with.group.all_reduce(whole(mine, with.type), op).wait();
        with.expect_equal(mine, reduced, name_of(op));
        Bytes elsewhere(mine.size());
        mine = with.inputs[with.me()];
        with.group.all_reduce(whole(elsewhere, with.type), whole(mine, with.type), op).wait();
        with.expect_equal(elsewhere, reduced, "all_reduce into another buffer");
        with.expect_equal(mine, with.inputs[with.me()], "the input of that all_reduce");
        mine = with.inputs[with.me()];
        const int root = with.group.size() - 1;
        with.group.reduce(whole(mine, with.type), root, op).wait();
        with.expect_equal(mine, with.group.rank() == root ? reduced : with.inputs[with.me()], "reduce");
        mine = with.inputs[with.me()];
        Bytes part(with.each());
        with.group.reduce_scatter(whole(part, with.type), whole(mine, with.type), op).wait();
        with.expect_equal(part, slice(reduced, with.me(), with.each()), "reduce_scatter");
        const Buffer in_place{mine.data() + with.me() * with.each(), with.count, with.type, {}};
        with.group.reduce_scatter(in_place, whole(mine, with.type), op).wait();
        with.expect_equal(slice(mine, with.me(), with.each()), part, "reduce_scatter in place");
    }
}

/// Slices of different lengths, one of them empty.
void uneven(const Case& with) {
    const std::size_t size = size_of(with.type), me = with.me();
    Counts counts;
    for (std::size_t r = 0; r < with.ranks(); ++r) counts.push_back(with.count * (r % 4) / 3);
    const std::size_t all = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    const std::size_t before =
        std::accumulate(counts.begin(), counts.begin() + with.group.rank(), std::size_t{0});
    const auto range = [&](const Bytes& bytes, std::size_t from, std::size_t count) {
        const auto begin = bytes.begin() + static_cast<long>(from * size);
        return Bytes(begin, begin + static_cast<long>(count * size));
    };
    Bytes firsts, for_me;
    for (std::size_t r = 0; r < with.ranks(); ++r) {
        const Bytes first = range(with.inputs[r], 0, counts[r]),
                    mine = range(with.inputs[r], before, counts[me]);
        firsts.insert(firsts.end(), first.begin(), first.end());
        for_me.insert(for_me.end(), mine.begin(), mine.end());
    }
    Bytes part = range(with.inputs[me], 0, counts[me]), whole_input = range(with.inputs[me], 0, all),
          gathered(firsts.size()), received(for_me.size());
    with.group.all_gather_v(whole(gathered, with.type), whole(part, with.type), counts).wait();
    with.expect_equal(gathered, firsts, "all_gather_v");
    with.group
        .all_to_all_v(whole(received, with.type), Counts(with.ranks(), counts[me]),
                      whole(whole_input, with.type), counts)
        .wait();
    with.expect_equal(received, for_me, "all_to_all_v");
    const ReduceOp op = with.type == DType::Bool ? ReduceOp::Max : ReduceOp::Sum;
    with.group.reduce_scatter_v(whole(part, with.type), whole(whole_input, with.type), counts, op).wait();
    with.expect_equal(part, range(reference::reduce(with.inputs, with.type, op), before, counts[me]),
                      "reduce_scatter_v");
}

void moves(const Case& with) {
    ProcessGroup& group = with.group;
    Bytes firsts, own_slices;
    for (const Bytes& input : with.inputs) {
        const Bytes first = slice(input, 0, with.each()), own = slice(input, with.me(), with.each());
        firsts.insert(firsts.end(), first.begin(), first.end());
        own_slices.insert(own_slices.end(), own.begin(), own.end());
    }
    Bytes mine = with.inputs[with.me()], part = slice(mine, 0, with.each()), all(firsts.size());
    group.all_gather(whole(all, with.type), whole(part, with.type)).wait();
    with.expect_equal(all, firsts, "all_gather");
    const Buffer in_place{all.data() + with.me() * with.each(), with.count, with.type, {}};
    group.all_gather(whole(all, with.type), in_place).wait();
    with.expect_equal(all, firsts, "all_gather in place");
    std::fill(all.begin(), all.end(), std::byte{});
    group.gather(whole(all, with.type), whole(part, with.type), 0).wait();
    if (group.rank() == 0) with.expect_equal(all, firsts, "gather");
    group.all_to_all(whole(all, with.type), whole(mine, with.type)).wait();
    with.expect_equal(all, own_slices, "all_to_all");
    group.scatter(whole(part, with.type), whole(mine, with.type), 0).wait();
    with.expect_equal(part, slice(with.inputs[0], with.me(), with.each()), "scatter");
    uneven(with);
    group.broadcast(whole(mine, with.type), 0).wait();
    with.expect_equal(mine, with.inputs[0], "broadcast");
    if (group.size() == 1) return;
    const int next = (group.rank() + 1) % group.size(),
              previous = (group.rank() + group.size() - 1) % group.size();
    mine = with.inputs[with.me()];
    Bytes got(mine.size());
    group.batch_send_recv({{Send, whole(mine, with.type), next}, {Recv, whole(got, with.type), previous}})
        .wait();
    with.expect_equal(got, with.inputs[static_cast<std::size_t>(previous)], "batch_send_recv");
    if (group.rank() == 0) group.send(whole(mine, with.type), 1).wait();
    if (group.rank() == 1) {
        group.recv(whole(got, with.type), 0).wait();
        with.expect_equal(got, with.inputs[0], "recv");
    }
}

void run_everything(ProcessGroup& group) {
    for (const DType type : kTypes) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5'003}}) {
            Case with{group, type, count, {}};
            for (int r = 0; r < group.size(); ++r)
                with.inputs.push_back(values_of(r, type, count * static_cast<std::size_t>(group.size())));
            reduces(with);
            moves(with);
        }
    }
    const auto messages = group.all_gather_bytes(std::string(static_cast<std::size_t>(group.rank()), 'x'));
    for (std::size_t r = 0; r < messages.size(); ++r) expect(messages[r].size() == r, "all_gather_bytes");
    std::vector<float> values(1, 1);
    const auto half = group.split(group.rank() % 2, -group.rank());
    half->all_reduce(buffer_of(values)).wait();
    expect(values[0] == static_cast<float>(half->size()), "a sum over a sub-group");
    expect(group.split(-1, 0) == nullptr, "no group for a negative color");
    expect(group.allocate_shared(1000).size() == 1000, "allocate_shared");
    group.barrier().wait();
}

/// Rank 0 starts a sum and does not wait for it; rank 1 joins the sum only after rank 0 has said so.
void go_on_by_itself(ProcessGroup& group, const char* fifo) {
    std::vector<float> values(100'000, 1), others(100'000, 1);
    const auto other = group.split(0, group.rank());
    const bool is_first = group.rank() == 0;
    if (!is_first) ::close(::open(fifo, O_RDONLY));
    // Groups do not wait for each other either.
    Work one = (is_first ? group : *other).all_reduce(buffer_of(is_first ? values : others));
    Work two = (is_first ? *other : group).all_reduce(buffer_of(is_first ? others : values));
    if (is_first) ::close(::open(fifo, O_WRONLY));
    while (!one.done() || !two.done()) ::sched_yield();
    expect(values[0] == 2 && others[0] == 2, "sums that go on by themselves");
}

int count_otherwise(ProcessGroup& group) {
    std::vector<float> all(6), mine(group.rank() == 1 ? 4 : 3);
    try {
        group.all_gather_v(buffer_of(all), buffer_of(mine), group.rank() == 1 ? Counts{2, 4} : Counts{3, 3})
            .wait();
    } catch (const Error& error) {
        fmt::print("{}\n", error.what());
    }
    return 1;
}

/// Waits for rank 1, which never comes; its mpiexec ends it because of the others.
int wait_for_one_that_never_comes(ProcessGroup& group) {
    group.barrier().wait();
    if (group.rank() == 1) ::pause();
    try {
        group.monitored_barrier(std::chrono::milliseconds(200));
    } catch (const TimeoutError& error) {
        fmt::print("{}\n", error.what());
    }
    try {
        group.barrier().wait();
    } catch (const TimeoutError&) {
        fmt::print("so does every later call\n");
    }
    return 1;
}

void fork_children(ProcessGroup& group) {
    for (const auto what : {testing::InChild::DestroysGroup, testing::InChild::LeavesGroup}) {
        const std::string misdeeds = testing::misdeeds_of_child(group, what);
        expect(misdeeds.empty(), misdeeds);
        group.barrier().wait();
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const Context context = Context::from_env();
        const std::string act = argc > 1 ? argv[1] : "";
        const bool has_thread = act == "thread" || act == "progress" || argc > 2;
        const auto group =
            ProcessGroup::create(context, {.timeout = std::chrono::seconds(60),
                                           .backend = "mpi",
                                           .progress = has_thread ? ProcessGroupOptions::Progress::Thread
                                                                  : ProcessGroupOptions::Progress::Auto});
        if (act == "alone") return wait_for_one_that_never_comes(*group);
        if (act == "killed") {
            group->barrier().wait();
            if (group->rank() == 1) ::raise(SIGKILL);
            group->barrier().wait();
        }
        if (act == "uneven") return count_otherwise(*group);
        if (act == "forked") fork_children(*group);
        else if (act == "progress") go_on_by_itself(*group, argv[2]);
        else run_everything(*group);
        std::vector<std::int32_t> all_wrong(1, wrong);
        group->all_reduce(buffer_of(all_wrong)).wait();
        if (group->rank() == 0 && all_wrong[0] == 0)
            fmt::print("{} ranks, {}: all is well\n", group->size(), group->describe());
        std::fflush(stdout);  // MPI has not finalized yet
    } catch (const std::exception& error) {
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
    return wrong == 0 ? 0 : 1;
}
