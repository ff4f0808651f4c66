#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ddp/shm/kernels.h"
#include "ddp/testing.h"
#include "reference_reduction.h"
#include "tests/support/half_float.h"

namespace {

using namespace ddp;
using ddp::testing::run_ranks;
using reference::Bytes;

using reference::kTypes;
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::Product};
// Counts around the limits of the algorithms: cache lines, the limit of a slot, one and several ranges.
constexpr std::size_t kCounts[] = {0, 1, 2, 15, 17, 63, 513, 1023, 1024, 1025, 4099, 100'003, 1'500'007};

std::vector<Bytes> random_inputs(DType type, std::size_t count, int ranks, unsigned seed) {
    std::vector<Bytes> inputs;
    for (int r = 0; r < ranks; ++r)
        inputs.push_back(reference::random_values(type, count, seed * 100 + static_cast<unsigned>(r)));
    return inputs;
}

Buffer buffer_at(std::byte* data, std::size_t count, DType type) { return {data, count, type, {}}; }

/// All-reduces every rank's input and returns each rank's result.
std::vector<Bytes> all_reduced(const std::vector<Bytes>& inputs, DType type, ReduceOp op,
                               std::size_t shift = 0) {
    std::vector<Bytes> outputs(inputs.size());
    run_ranks(static_cast<int>(inputs.size()), [&](ProcessGroup& group) {
        const Bytes& mine = inputs[static_cast<std::size_t>(group.rank())];
        Bytes room(mine.size() + shift + 64, std::byte{0xab});
        if (!mine.empty()) std::memcpy(room.data() + shift, mine.data(), mine.size());
        group.all_reduce(buffer_at(room.data() + shift, mine.size() / size_of(type), type), op).wait();
        for (std::size_t i = 0; i < shift; ++i)
            ASSERT_EQ(room[i], std::byte{0xab}) << "written before the buffer";
        for (std::size_t i = 0; i < 64; ++i)
            ASSERT_EQ(room[shift + mine.size() + i], std::byte{0xab}) << "written behind it";
        outputs[static_cast<std::size_t>(group.rank())] =
            Bytes(room.begin() + static_cast<long>(shift), room.end() - 64);
    });
    return outputs;
}

TEST(AllReduce, EqualsTheRankOrderedSumBitForBitOnEveryRankForAllTypesAndOperations) {
    for (const DType type : kTypes) {
        for (const ReduceOp op : kOps) {
            if (!is_reducible(type, op)) continue;
            for (const std::size_t count :
                 {std::size_t{1}, std::size_t{17}, std::size_t{1025}, std::size_t{40'003}}) {
                const auto inputs = random_inputs(type, count, 3, static_cast<unsigned>(count));
                const Bytes expected = reference::reduce(inputs, type, op);
                for (const Bytes& output : all_reduced(inputs, type, op)) {
                    ASSERT_EQ(output, expected) << name_of(type) << " " << name_of(op) << " " << count;
                }
            }
        }
    }
}

TEST(AllReduce, IsRightForAllSizesAndNumbersOfRanks) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const std::size_t count : kCounts) {
                if (ranks > 4 && count > 1'000'000) continue;
                const auto inputs = random_inputs(DType::F32, count, ranks, 7);
                Bytes mine = inputs[static_cast<std::size_t>(group.rank())];
                group.all_reduce(buffer_at(mine.data(), count, DType::F32)).wait();
                ASSERT_EQ(mine, reference::reduce(inputs, DType::F32, ReduceOp::Sum))
                    << ranks << " ranks, " << count;
            }
        });
    }
}

TEST(AllReduce, TakesBuffersAtAnyAddress) {
    for (const std::size_t shift : {1, 3, 4, 60}) {
        for (const std::size_t count : {std::size_t{5}, std::size_t{1000}, std::size_t{70'001}}) {
            const auto inputs = random_inputs(DType::F32, count, 2, 11);
            const Bytes expected = reference::reduce(inputs, DType::F32, ReduceOp::Sum);
            for (const Bytes& output : all_reduced(inputs, DType::F32, ReduceOp::Sum, shift))
                ASSERT_EQ(output, expected);
        }
    }
}

TEST(AllReduce, GivesTheSameBitsInSharedAndPrivateMemoryAndInMixesOfThem) {
    constexpr std::size_t kCount = 300'001;
    const auto inputs = random_inputs(DType::F32, kCount, 4, 3);
    const Bytes expected = reference::reduce(inputs, DType::F32, ReduceOp::Sum);
    for (const int ranks_in_shared_memory : {0, 1, 3, 4}) {
        run_ranks(4, [&](ProcessGroup& group) {
            const Bytes& input = inputs[static_cast<std::size_t>(group.rank())];
            const std::span<std::byte> region = group.allocate_shared(input.size() + 4);
            Bytes own(input.size() + 4);
            std::byte* data = (group.rank() < ranks_in_shared_memory ? region.data() : own.data()) + 4;
            std::memcpy(data, input.data(), input.size());
            group.all_reduce(buffer_at(data, kCount, DType::F32)).wait();
            ASSERT_EQ(std::memcmp(data, expected.data(), expected.size()), 0) << ranks_in_shared_memory;
        });
    }
}

TEST(AllReduce, GivesTheSameBitsForABufferAndForItsParts) {
    constexpr std::size_t kCount = 50'000;
    run_ranks(3, [&](ProcessGroup& group) {
        Bytes whole = reference::random_values(DType::F32, kCount, static_cast<unsigned>(group.rank()));
        Bytes parts = whole;
        group.all_reduce(buffer_at(whole.data(), kCount, DType::F32)).wait();
        std::size_t at = 0;
        for (const std::size_t count :
             {std::size_t{1}, std::size_t{999}, std::size_t{30'000}, kCount - 31'000}) {
            group.all_reduce(buffer_at(parts.data() + 4 * at, count, DType::F32)).wait();
            at += count;
        }
        ASSERT_EQ(whole, parts);
    });
}

TEST(AllReduce, KeepsManyCallsOfChangingSizesApart) {
    run_ranks(3, [](ProcessGroup& group) {
        for (int round = 0; round < 400; ++round) {
            const std::size_t count = static_cast<std::size_t>(round * 37 % 3000 + 1);
            std::vector<std::int64_t> values(count, round + group.rank());
            group.all_reduce(buffer_of(std::span(values))).wait();
            for (const std::int64_t value : values) ASSERT_EQ(value, 3 * round + 3);
        }
    });
}

TEST(AllReduce, KeepsANanOfAnyRank) {
    run_ranks(3, [](ProcessGroup& group) {
        for (const ReduceOp op : kOps) {
            std::vector<float> values(40, 1.0F);
            if (group.rank() == 1) values[7] = values[39] = std::nanf("");
            group.all_reduce(buffer_of(std::span(values)), op).wait();
            for (std::size_t i = 0; i < values.size(); ++i)
                ASSERT_EQ(std::isnan(values[i]), i == 7 || i == 39) << name_of(op);
        }
    });
}

TEST(AllReduce, RefusesWrongCombinationsAtTheCall) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<std::uint8_t> bytes(4);
        std::vector<std::int32_t> integers(4);
        EXPECT_THROW((void)group.all_reduce(buffer_of(std::span(bytes)), ReduceOp::Avg), InvalidInput);
        EXPECT_THROW((void)group.all_reduce(buffer_of(std::span(integers)), ReduceOp::Avg), InvalidInput);
        EXPECT_THROW((void)group.all_reduce({nullptr, 3, DType::F32, {}}), InvalidInput);
        EXPECT_THROW((void)group.all_reduce({integers.data(), 3, DType::I32, {Device::Kind::Cuda, 0}}),
                     InvalidInput);
    });
}

TEST(AllReduce, IntoAnotherBufferGivesTheSameBitsAndKeepsTheInput) {
    for (const int ranks : {1, 3}) {
        for (const std::size_t count : kCounts) {
            const auto inputs = random_inputs(DType::F32, count, ranks, 5);
            const Bytes expected = reference::reduce(inputs, DType::F32, ReduceOp::Sum);
            run_ranks(ranks, [&](ProcessGroup& group) {
                const Bytes& mine = inputs[static_cast<std::size_t>(group.rank())];
                const Bytes input = mine;
                const std::span<std::byte> shared = group.allocate_shared(input.size());
                Bytes own(input.size());
                for (const std::span<std::byte> output : {std::span(own), shared}) {
                    group
                        .all_reduce(buffer_at(output.data(), count, DType::F32),
                                    {input.data(), count, DType::F32, {}})
                        .wait();
                    ASSERT_TRUE(std::ranges::equal(output, expected)) << count;
                    ASSERT_EQ(input, mine) << count;
                }
            });
        }
    }
}

TEST(AllReduce, RefusesAnotherBufferOfAnotherSizeOrThatOverlaps) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> values(8);
        const std::span<float> all(values);
        const Buffer first = buffer_of(all.first(4));
        EXPECT_THROW((void)group.all_reduce(first, buffer_of(all.subspan(4, 3))), InvalidInput);
        EXPECT_THROW((void)group.all_reduce(first, buffer_of(all.subspan(3, 4))), InvalidInput);
        EXPECT_THROW((void)group.all_reduce(first, buffer_of(all.first(3))), InvalidInput);
        EXPECT_THROW((void)group.all_reduce(first, {values.data() + 4, 4, DType::I32, {}}), InvalidInput);
        group.all_reduce(first, buffer_of(all.last(4))).wait();
    });
}

TEST(Coalesced, CallsHaveOneWorkAndTheResultsOfSingleCalls) {
    for (const auto progress :
         {ProcessGroupOptions::Progress::Inline, ProcessGroupOptions::Progress::Thread}) {
        run_ranks(3,
                  [](ProcessGroup& group) {
                      std::vector<float> sum(1000, 1), from_root(7, static_cast<float>(group.rank())), all(3);
                      const std::vector<float> mine(1, static_cast<float>(group.rank()));
                      const Work work = group.coalesced([&] {
                          (void)group.all_reduce(buffer_of(sum));
                          (void)group.broadcast(buffer_of(from_root), 2);
                          (void)group.all_gather_v(buffer_of(all), buffer_of(mine), {1, 1, 1});
                          EXPECT_EQ(sum[0], 1) << "nothing starts inside";
                      });
                      Work(work).wait();
                      EXPECT_TRUE(work.done());
                      EXPECT_EQ(sum, std::vector<float>(1000, 3));
                      EXPECT_EQ(from_root, std::vector<float>(7, 2));
                      EXPECT_EQ(all, (std::vector<float>{0, 1, 2}));
                      group.coalesced([] {}).wait();
                  },
                  {.group = {.timeout = std::chrono::seconds(60), .progress = progress}});
    }
}

TEST(Coalesced, StartsNothingWhenOneCallIsRefused) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> values(4, 1);
        const auto sum_and = [&](const std::function<void()>& call) {
            return group.coalesced([&] {
                (void)group.all_reduce(buffer_of(values));
                call();
            });
        };
        EXPECT_THROW((void)sum_and([&] { (void)group.broadcast(buffer_of(values), 2); }), InvalidInput);
        EXPECT_THROW((void)sum_and([&] { (void)group.send(buffer_of(values), 1 - group.rank()); }),
                     InvalidInput);
        EXPECT_THROW((void)sum_and([&] { group.barrier().wait(); }), InvalidInput);
        EXPECT_THROW((void)sum_and([&] { group.split(0, 0); }), InvalidInput);
        EXPECT_THROW((void)sum_and([&] { (void)group.coalesced([] {}); }), InvalidInput);
        EXPECT_EQ(values, std::vector<float>(4, 1));
        group.all_reduce(buffer_of(values)).wait();
        EXPECT_EQ(values, std::vector<float>(4, 2));
    });
}

TEST(Bool, MaxIsOrAndMinIsAndAndThereIsNoSum) {
    run_ranks(3, [](ProcessGroup& group) {
        const bool one = group.rank() == 1;
        std::array<bool, 3> any{one, false, true}, all = any;
        group.all_reduce(buffer_of(any), ReduceOp::Max).wait();
        group.all_reduce(buffer_of(all), ReduceOp::Min).wait();
        EXPECT_EQ(any, (std::array{true, false, true}));
        EXPECT_EQ(all, (std::array{false, false, true}));
        EXPECT_THROW((void)group.all_reduce(buffer_of(any)), InvalidInput);
    });
}

TEST(Int8, KeepsItsSign) {
    run_ranks(2, [](ProcessGroup& group) {
        const std::vector<std::int8_t> mine{static_cast<std::int8_t>(-group.rank()), 100};
        std::vector<std::int8_t> least(2), sum(2);
        group.all_reduce(buffer_of(least), buffer_of(mine), ReduceOp::Min).wait();
        group.all_reduce(buffer_of(sum), buffer_of(mine)).wait();
        EXPECT_EQ(least, (std::vector<std::int8_t>{-1, 100}));
        EXPECT_EQ(sum, (std::vector<std::int8_t>{-1, -56}));  // sums wrap
    });
}

TEST(Collectives, RefuseNumbersThatAreNoElementTypeOrReduction) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> values(4);
        const auto no_type = static_cast<DType>(77);
        const auto no_reduction = static_cast<ReduceOp>(77);
        const auto why_not = [&](Buffer buffer, ReduceOp op) -> std::string {
            try {
                group.all_reduce(buffer, op).wait();
                return "it was taken";
            } catch (const InvalidInput& error) {
                return error.what();
            }
        };
        EXPECT_EQ(why_not({values.data(), 4, no_type, {}}, ReduceOp::Sum),
                  "all_reduce: there is no element type 77");
        EXPECT_EQ(why_not(buffer_of(std::span(values)), no_reduction),
                  "all_reduce: there is no reduction 77");
        EXPECT_THROW((void)group.broadcast({values.data(), 4, no_type, {}}, 0), InvalidInput);
        EXPECT_THROW((void)group.reduce(buffer_of(std::span(values)), 0, no_reduction), InvalidInput);
        EXPECT_THROW(check_tensors(std::array{Tensor{"w", {4}, {values.data(), 4, no_type, {}}}}),
                     InvalidInput);
        group.barrier().wait();
    });
}

TEST(Broadcast, GivesEveryRankTheRootsBytes) {
    run_ranks(4, [](ProcessGroup& group) {
        for (const DType type : {DType::U8, DType::F16, DType::F64}) {
            for (const std::size_t count : kCounts) {
                const int root = static_cast<int>(count % 4);
                const Bytes expected =
                    reference::random_bytes(count * size_of(type), 77 + static_cast<unsigned>(root));
                Bytes mine = group.rank() == root ? expected : Bytes(expected.size());
                group.broadcast(buffer_at(mine.data(), count, type), root).wait();
                ASSERT_EQ(mine, expected) << name_of(type) << " " << count;
            }
        }
        EXPECT_THROW((void)group.broadcast({}, 4), InvalidInput);
        EXPECT_THROW((void)group.broadcast({}, -1), InvalidInput);
    });
}

TEST(AllGather, PutsEveryRanksInputInItsPlace) {
    for (const int ranks : {1, 2, 5}) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const std::size_t count : kCounts) {
                Bytes expected;
                for (int r = 0; r < ranks; ++r) {
                    const Bytes input = reference::random_bytes(count * 2, static_cast<unsigned>(r));
                    expected.insert(expected.end(), input.begin(), input.end());
                }
                Bytes input = reference::random_bytes(count * 2, static_cast<unsigned>(group.rank()));
                Bytes output(expected.size());
                group
                    .all_gather(
                        buffer_at(output.data(), count * static_cast<std::size_t>(ranks), DType::BF16),
                        buffer_at(input.data(), count, DType::BF16))
                    .wait();
                ASSERT_EQ(output, expected) << count;
            }
        });
    }
}

TEST(AllGather, TakesAnInputInsideItsOutput) {
    run_ranks(3, [](ProcessGroup& group) {
        std::vector<std::int32_t> all(3 * 1000, -1);
        const std::span<std::int32_t> mine =
            std::span(all).subspan(static_cast<std::size_t>(group.rank()) * 1000, 1000);
        std::fill(mine.begin(), mine.end(), group.rank());
        group.all_gather(buffer_of(std::span(all)), buffer_of(mine)).wait();
        for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<int>(i / 1000));
    });
}

TEST(ReduceScatter, GivesTheRanksSliceOfTheReduction) {
    for (const int ranks : {1, 2, 3, 8}) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const DType type : {DType::F32, DType::BF16}) {
                for (const std::size_t count :
                     {std::size_t{0}, std::size_t{1}, std::size_t{1025}, std::size_t{150'001}}) {
                    auto inputs = random_inputs(type, count * static_cast<std::size_t>(ranks), ranks, 5);
                    const Bytes reduced = reference::reduce(inputs, type, ReduceOp::Avg);
                    const std::size_t each = count * size_of(type);
                    const auto rank = static_cast<std::size_t>(group.rank());
                    Bytes output(each);
                    group
                        .reduce_scatter(
                            buffer_at(output.data(), count, type),
                            buffer_at(inputs[rank].data(), count * static_cast<std::size_t>(ranks), type),
                            ReduceOp::Avg)
                        .wait();
                    const auto from = reduced.begin() + static_cast<long>(rank * each);
                    ASSERT_EQ(output, Bytes(from, from + static_cast<long>(each))) << ranks << " " << count;
                }
            }
        });
    }
}

TEST(Gather, RefusesBuffersOfDifferentSizes) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> two(2), three(3);
        std::vector<double> wide(2);
        EXPECT_THROW((void)group.all_gather(buffer_of(std::span(three)), buffer_of(std::span(two))),
                     InvalidInput);
        EXPECT_THROW((void)group.all_gather(buffer_of(std::span(wide)), buffer_of(std::span(two))),
                     InvalidInput);
        EXPECT_THROW((void)group.reduce_scatter(buffer_of(std::span(two)), buffer_of(std::span(three))),
                     InvalidInput);
    });
}

TEST(AllGatherBytes, GathersMessagesOfAnyLength) {
    for (const int ranks : {1, 4}) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            const auto message = [](int rank) {
                const std::size_t lengths[] = {5, 0, 3'000'001, 1'048'576};
                return std::string(lengths[rank], static_cast<char>('a' + rank));
            };
            const auto all = group.all_gather_bytes(message(group.rank()));
            ASSERT_EQ(all.size(), static_cast<std::size_t>(ranks));
            for (int r = 0; r < ranks; ++r) ASSERT_EQ(all[static_cast<std::size_t>(r)], message(r));
        });
    }
}

TEST(AllocateShared, GivesZeroedAlignedMemoryOfTheRanksOwn) {
    run_ranks(3, [](ProcessGroup& group) {
        for (const std::size_t bytes :
             {std::size_t{0}, std::size_t{1}, std::size_t{5000}, std::size_t{3'000'000}}) {
            const std::span<std::byte> region = group.allocate_shared(bytes);
            ASSERT_EQ(region.size(), bytes);
            ASSERT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % 64, 0U);
            for (const std::byte b : region) ASSERT_EQ(b, std::byte{0});
            std::fill(region.begin(), region.end(), static_cast<std::byte>(group.rank() + 1));
            group.barrier().wait();
            for (const std::byte b : region) ASSERT_EQ(b, static_cast<std::byte>(group.rank() + 1));
        }
    });
}

TEST(ProgressThread, RunsCollectivesInOrderWhileTheCallerContinues) {
    ddp::testing::RankOptions options;
    options.group.progress = ProcessGroupOptions::Progress::Thread;
    run_ranks(
        2,
        [](ProcessGroup& group) {
            std::vector<std::vector<std::int32_t>> buffers(50, std::vector<std::int32_t>(2000, 1));
            std::vector<Work> works;
            for (auto& buffer : buffers) works.push_back(group.all_reduce(buffer_of(std::span(buffer))));
            std::vector<std::int32_t>& last = buffers.back();
            works.push_back(group.all_reduce(buffer_of(std::span(last))));
            works.back().wait();
            for (const Work& work : works)
                EXPECT_TRUE(work.done()) << "an earlier collective ended after a later one";
            for (const std::int32_t value : buffers.front()) ASSERT_EQ(value, 2);
            for (const std::int32_t value : last) ASSERT_EQ(value, 4);
        },
        options);
}

TEST(Kernels, AreThoseThatTheProcessorHas) {
    std::vector<std::string> names, expected{"baseline"};
    for (const cpu::Kernels* set : cpu::supported_kernels()) names.emplace_back(set->name);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) expected.emplace_back("avx2");
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        expected.emplace_back("avx512");
#endif
    EXPECT_EQ(names, expected);
}

TEST(Kernels, GiveTheSameBitsInEveryInstructionSet) {
    for (const DType type : kTypes) {
        for (const ReduceOp op : kOps) {
            if (!is_reducible(type, op)) continue;
            for (const int ranks : {1, 2, 3, 4, 7}) {
                for (const std::size_t count : {std::size_t{1}, std::size_t{31}, std::size_t{1000}}) {
                    const auto inputs = random_inputs(type, count, ranks, 9);
                    std::vector<const void*> sources;
                    for (const Bytes& input : inputs) sources.push_back(input.data());
                    const Bytes expected = reference::reduce(inputs, type, op);
                    for (const cpu::Kernels* set : cpu::supported_kernels()) {
                        Bytes out(count * size_of(type));
                        set->reduce[static_cast<std::size_t>(type)][static_cast<std::size_t>(op)](
                            out.data(), sources.data(), ranks, count);
                        ASSERT_EQ(out, expected)
                            << set->name << " " << name_of(type) << " " << name_of(op) << " " << ranks;
                    }
                }
            }
        }
    }
}

TEST(Kernels, RoundBfloat16ToNearestEvenOnceAndKeepNan) {
    // 1 + 2^-8 is halfway between two bfloat16 numbers, and rounds down to even. 1 + 3 * 2^-8 is halfway too,
    // and rounds up to even.
    const std::uint16_t one = 0x3f80, half_step = 0x3b80, three_half_steps = 0x3c40, nan = 0x7fc1;
    for (const cpu::Kernels* set : cpu::supported_kernels()) {
        const std::uint16_t a[] = {one, one, nan, one}, b[] = {half_step, three_half_steps, one, nan};
        const void* sources[] = {a, b};
        std::uint16_t out[4];
        set->reduce[static_cast<std::size_t>(DType::BF16)][0](out, sources, 2, 4);
        EXPECT_EQ(out[0], 0x3f80);
        EXPECT_EQ(out[1], 0x3f82);
        EXPECT_TRUE((out[2] & 0x7fff) > 0x7f80 && (out[3] & 0x7fff) > 0x7f80);
    }
}

TEST(Kernels, ConvertEveryFloat16ExactlyAndRoundToNearestEvenOnce) {
    std::vector<std::uint16_t> every(65536), zeros(65536, 0x8000), out(65536);
    for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::uint16_t>(i);
    // Each source is combined with -0, which changes nothing, and with itself: through float and back.
    const void* unchanged[] = {every.data(), zeros.data()};
    const void* doubled[] = {every.data(), every.data()};
    const void* in_between[] = {every.data(), zeros.data(), every.data()};
    for (const cpu::Kernels* set : cpu::supported_kernels()) {
        const auto& sums = set->reduce[static_cast<std::size_t>(DType::F16)];
        const auto check = [&](const char* what, auto expected) {
            for (std::size_t i = 0; i < every.size(); ++i) {
                const float wide = half_float::from_f16(every[i]);
                if (std::isnan(wide)) ASSERT_TRUE(std::isnan(half_float::from_f16(out[i]))) << what << i;
                else ASSERT_EQ(out[i], half_float::to_f16(expected(wide))) << set->name << what << i;
            }
        };
        sums[static_cast<std::size_t>(ReduceOp::Sum)](out.data(), unchanged, 2, every.size());
        check(" unchanged ", [](float x) { return x; });
        sums[static_cast<std::size_t>(ReduceOp::Sum)](out.data(), doubled, 2, every.size());
        check(" doubled ", [](float x) { return x + x; });
        sums[static_cast<std::size_t>(ReduceOp::Avg)](out.data(), in_between, 3, every.size());
        check(" two thirds ", [](float x) { return (x + x) / 3.0F; });
    }
}

TEST(Kernels, StreamCopiesEveryByteAtAnyAlignment) {
    const Bytes from = reference::random_bytes(1000, 1);
    for (const cpu::Kernels* set : cpu::supported_kernels()) {
        for (std::size_t shift = 0; shift < 70; ++shift) {
            for (const std::size_t length : {0UL, 1UL, 63UL, 64UL, 65UL, 500UL}) {
                Bytes to(1200, std::byte{0x5a});
                set->stream(to.data() + shift, from.data() + shift % 7, length);
                set->fence();
                ASSERT_EQ(std::memcmp(to.data() + shift, from.data() + shift % 7, length), 0);
                ASSERT_EQ(to[shift + length], std::byte{0x5a});
                if (shift > 0) {
                    ASSERT_EQ(to[shift - 1], std::byte{0x5a});
                }
            }
        }
    }
}

}  // namespace
