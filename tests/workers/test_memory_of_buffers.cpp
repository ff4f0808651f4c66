#include <gtest/gtest.h>

#include <cstring>

#include "on_nodes.h"
#include "reference_reduction.h"

namespace {

using namespace ddp;
using reference::Bytes;
using reference::slice;

/// Which ranks' buffers are from allocate_shared.
enum class Shared { None, All, Odd };

/// Slices of bytes, of elements around the limits of a step, of a piece and of several pieces.
struct Case {
    DType type;
    std::size_t count;
};
constexpr Case kCases[] = {{DType::F32, 1},     {DType::F32, 1027},    {DType::F32, 150'001},
                           {DType::F64, 1027},  {DType::I32, 40'003},  {DType::I64, 1027},
                           {DType::BF16, 1027}, {DType::BF16, 80'003}, {DType::F16, 40'003},
                           {DType::I8, 1027},   {DType::Bool, 1027},   {DType::U8, 1},
                           {DType::U8, 700'001}};

class MemoryOfBuffers : public ddp::testing::OnNodes {
  protected:
    /// Calls `check` for all of these, with a place for the slices of all ranks, twice, and every rank's
    /// slices.
    static void run_all(const std::function<void(ProcessGroup&, const Case&, std::byte* from, std::byte* to,
                                                 const std::vector<Bytes>& values)>& check) {
        std::vector<std::vector<Bytes>> values;  // by case and rank
        const auto n = static_cast<std::size_t>(ranks());
        for (const Case& one : kCases) {
            values.emplace_back();
            for (unsigned rank = 0; rank < n; ++rank)
                values.back().push_back(reference::random_values(one.type, n * one.count, 40 + rank));
        }
        run([&](ProcessGroup& group) {
            const std::span<std::byte> shared = group.allocate_shared(2 * n * 700'001 + 8);
            Bytes own(shared.size());
            for (const Shared which : {Shared::None, Shared::All, Shared::Odd}) {
                const bool here = which == Shared::All || (which == Shared::Odd && group.rank() % 2 == 1);
                for (std::size_t i = 0; i < values.size(); ++i) {
                    const Case& one = kCases[i];
                    std::byte* const from = (here ? shared.data() : own.data()) + 8;
                    check(group, one, from, from + n * one.count * size_of(one.type), values[i]);
                    if (::testing::Test::HasFatalFailure())
                        FAIL() << static_cast<int>(which) << " " << name_of(one.type) << " " << one.count;
                }
            }
        });
    }
    static void put(std::byte* at, const Bytes& bytes) { std::memcpy(at, bytes.data(), bytes.size()); }
    static Bytes taken(const std::byte* at, std::size_t bytes) { return {at, at + bytes}; }
};
INSTANTIATE_TEST_SUITE_P(Of, MemoryOfBuffers,
                         ::testing::Values(std::vector<int>{1}, std::vector<int>{2}, std::vector<int>{5},
                                           std::vector<int>{1, 1}, std::vector<int>{2, 2},
                                           std::vector<int>{1, 2, 1}),
                         [](const auto& nodes) {
                             std::string name;
                             for (const int ranks : nodes.param) name += "And" + std::to_string(ranks);
                             return name.substr(3);
                         });

TEST_P(MemoryOfBuffers, ChangesNoByteOfAnAllGather) {
    run_all([](ProcessGroup& group, const Case& one, std::byte* from, std::byte* to,
               const std::vector<Bytes>& values) {
        const std::size_t n = values.size(), each = one.count * size_of(one.type);
        const auto me = static_cast<std::size_t>(group.rank());
        Bytes expected;
        for (const Bytes& of_rank : values)
            expected.insert(expected.end(), of_rank.begin(), of_rank.begin() + static_cast<long>(each));
        std::byte* const place = to + me * each;
        for (std::byte* const input : {from, place}) {
            std::memset(to, 0, n * each);
            put(input, slice(values[me], 0, each));
            group.all_gather({to, n * one.count, one.type, {}}, {input, one.count, one.type, {}}).wait();
            ASSERT_EQ(taken(to, n * each), expected) << (input == place ? "in place" : "apart");
        }
    });
}

TEST_P(MemoryOfBuffers, ChangesNoBitOfAReduceScatter) {
    run_all([](ProcessGroup& group, const Case& one, std::byte* from, std::byte* to,
               const std::vector<Bytes>& values) {
        const std::size_t n = values.size(), each = one.count * size_of(one.type);
        const auto me = static_cast<std::size_t>(group.rank());
        for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
            if (!is_reducible(one.type, op)) continue;
            Bytes whole = values[me];
            group.all_reduce({whole.data(), n * one.count, one.type, {}}, op).wait();
            for (std::byte* const output : {to, from + me * each}) {
                put(from, values[me]);
                group
                    .reduce_scatter({output, one.count, one.type, {}}, {from, n * one.count, one.type, {}},
                                    op)
                    .wait();
                ASSERT_EQ(taken(output, each), slice(whole, me, each))
                    << name_of(op) << (output == to ? " apart" : " in place");
            }
        }
    });
}

TEST_P(MemoryOfBuffers, ChangesNoByteOfAnAllToAll) {
    run_all([](ProcessGroup& group, const Case& one, std::byte* from, std::byte* to,
               const std::vector<Bytes>& values) {
        const std::size_t n = values.size(), each = one.count * size_of(one.type);
        const auto me = static_cast<std::size_t>(group.rank());
        put(from, values[me]);
        group.all_to_all({to, n * one.count, one.type, {}}, {from, n * one.count, one.type, {}}).wait();
        for (std::size_t rank = 0; rank < n; ++rank)
            ASSERT_EQ(taken(to + rank * each, each), slice(values[rank], me, each)) << rank;
    });
}

TEST_P(MemoryOfBuffers, ChangesNoByteOfABroadcast) {
    run_all([](ProcessGroup& group, const Case& one, std::byte* from, std::byte*,
               const std::vector<Bytes>& values) {
        for (std::size_t root = 0; root < values.size(); ++root) {
            put(from, values[static_cast<std::size_t>(group.rank())]);
            group.broadcast({from, values.size() * one.count, one.type, {}}, static_cast<int>(root)).wait();
            ASSERT_EQ(taken(from, values[root].size()), values[root]) << root;
        }
    });
}

}  // namespace
