// The entry points of cuBLASLt that train calls, over host memory and the streams of fake_cuda. Exactly the
// descriptors, layouts and epilogues that train uses; anything else is refused, and said on stderr.
//
// FAKE_CUBLASLT             what this one lacks, as it does on some chips: epilogues by number ("134,512"),
// or
//                           "all"
// FAKE_CUBLASLT_ALGORITHMS  what it offers for each product, best first in its opinion; "plain" if not said:
//                           NAME[*UNITS][@EPILOGUE],... where UNITS is how long it pretends to take, else 1
//     plain    sums in order
//     reverse  sums in reverse: other bits
//     refuse   turns out not to be supported when it is to run
//     big      needs more workspace than anybody has
//     void     is no algorithm: its state says so
//
// long fake_cublaslt_calls(int n)  how often this process has asked for the n-th that is offered to run
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ddp/cuda/kernel_dialect.h"
#include "tests/support/fake_nccl/fake_cuda.h"
#include "train/cublaslt_api.h"

namespace fake {

namespace lt = train::lt;
using lt::Code;
using lt::Epilogue;

namespace {

struct Desc {
    lt::ComputeType compute = lt::ComputeType::F32;
    lt::Operation trans_a = lt::Operation::None, trans_b = lt::Operation::None;
    Epilogue epilogue = Epilogue::None;
    void* bias = nullptr;
    void* aux = nullptr;
    std::int64_t aux_ld = 0;
};

struct Layout {
    lt::DataType type;
    std::uint64_t rows, columns;
    std::int64_t leading;
    bool operator==(const Layout&) const = default;
};

struct Preference {
    std::uint64_t workspace = 0;
    std::uint32_t reductions = 7;
    std::uint32_t align_a = 256, align_b = 256, align_d = 256;
};

Code refuse(Code code, const std::string& why) {
    std::fprintf(stderr, "fake cuBLASLt: %s\n", why.c_str());
    return code;
}

bool lacks(Epilogue epilogue) {
    const char* text = std::getenv("FAKE_CUBLASLT");
    std::istringstream words(text != nullptr ? text : "");
    for (std::string word; std::getline(words, word, ',');) {
        if (word == "all" && epilogue != Epilogue::None) return true;
        if (word == std::to_string(static_cast<int>(epilogue))) return true;
    }
    return false;
}

bool is_known(Epilogue epilogue) {
    for (const Epilogue known : {Epilogue::None, Epilogue::Bias, Epilogue::ReluBias, Epilogue::ReluAuxBias,
                                 Epilogue::DRelu, Epilogue::BgradB}) {
        if (epilogue == known) return true;
    }
    return false;
}

/// One product, checked: op(A) is m x k, op(B) is k x n.
struct Problem {
    Desc desc;
    Layout a, b, d;
    std::uint64_t m, n, k;
};

/// "" or what is wrong with it.
std::string fill(Problem& p, const Desc& desc, const Layout& a, const Layout& b, const Layout& c,
                 const Layout& d) {
    const bool as_is_a = desc.trans_a == lt::Operation::None, as_is_b = desc.trans_b == lt::Operation::None;
    p = {desc,
         a,
         b,
         d,
         as_is_a ? a.rows : a.columns,
         as_is_b ? b.columns : b.rows,
         as_is_a ? a.columns : a.rows};
    if (p.m == 0 || p.n == 0 || p.k == 0) return "a size is 0";
    if (!(c == d)) return "C is laid out unlike D";
    if (a.type != d.type || b.type != d.type) return "the types of A, B and D differ";
    if ((as_is_b ? b.rows : b.columns) != p.k || d.rows != p.m || d.columns != p.n)
        return "shapes do not fit";
    for (const Layout& layout : {a, b, d}) {
        if (layout.leading < static_cast<std::int64_t>(layout.rows)) return "columns overlap";
    }
    if (!is_known(desc.epilogue)) return "unknown epilogue";
    const bool has_aux = desc.epilogue == Epilogue::ReluAuxBias || desc.epilogue == Epilogue::DRelu;
    const bool has_bias = desc.epilogue != Epilogue::None && desc.epilogue != Epilogue::DRelu;
    if (has_bias && desc.bias == nullptr) return "the epilogue has no bias pointer";
    if (has_aux && desc.aux == nullptr) return "the epilogue has no aux pointer";
    if (has_aux && (desc.aux_ld % 128 != 0 || desc.aux_ld < static_cast<std::int64_t>(p.m)))
        return "the mask's leading dimension is no multiple of 128 that holds a column";
    return "";
}

enum class Manner : unsigned { Plain, Reverse, Refuse, Big, Void };

/// One of the algorithms on offer.
struct Offer {
    Manner manner = Manner::Plain;
    unsigned units = 1;
};

constexpr std::size_t kBig = std::size_t{1} << 40;
constexpr std::size_t kMostOffers = 16;
std::array<std::atomic<long>, kMostOffers>& calls() {
    static std::array<std::atomic<long>, kMostOffers> all{};
    return all;
}

Manner manner_of(const std::string& name) {
    const char* const names[] = {"plain", "reverse", "refuse", "big", "void"};
    for (unsigned i = 0; i < std::size(names); ++i) {
        if (name == names[i]) return static_cast<Manner>(i);
    }
    std::fprintf(stderr, "fake cuBLASLt: FAKE_CUBLASLT_ALGORITHMS: '%s' is unknown\n", name.c_str());
    std::abort();
}

std::vector<Offer> offers_for(Epilogue epilogue) {
    const char* text = std::getenv("FAKE_CUBLASLT_ALGORITHMS");
    std::istringstream words(text != nullptr ? text : "plain");
    std::vector<Offer> offers;
    for (std::string word; std::getline(words, word, ',');) {
        const std::size_t at = word.find('@'), star = word.find('*');
        if (at != std::string::npos && std::stoi(word.substr(at + 1)) != static_cast<int>(epilogue)) continue;
        Offer offer{manner_of(word.substr(0, std::min(at, star))), 1};
        if (star != std::string::npos) offer.units = static_cast<unsigned>(std::stoi(word.substr(star + 1)));
        offers.push_back(offer);
    }
    return offers;
}

/// As a number, the alignment of a pointer that the library finds in the product's description.
std::uint64_t alignment_of(const void* pointer) {
    const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(pointer) | 256;
    return bits & -bits;
}

constexpr std::uint64_t kMagic = 0xcb1a51;

/// What the algorithm was chosen for: another problem may not use it.
lt::Algorithm algorithm_for(const Problem& p, std::size_t number, const Offer& offer) {
    return {{kMagic | number << 24,
             static_cast<std::uint64_t>(p.desc.epilogue) |
                 std::uint64_t{static_cast<unsigned>(offer.manner)} << 16 | std::uint64_t{offer.units} << 24,
             p.m, p.n, p.k, static_cast<std::uint64_t>(p.a.leading), static_cast<std::uint64_t>(p.b.leading),
             static_cast<std::uint64_t>(p.d.leading)}};
}
std::size_t number_of(const lt::Algorithm& algorithm) { return algorithm.opaque[0] >> 24 & 0xFF; }
Offer offer_of(const lt::Algorithm& algorithm) {
    return {static_cast<Manner>(algorithm.opaque[1] >> 16 & 0xFF),
            static_cast<unsigned>(algorithm.opaque[1] >> 24 & 0xFFFF)};
}
/// The alignments that an algorithm counts on: of A, B, D as promised, of bias and mask as they were seen.
struct Alignments {
    std::uint64_t a = 0, b = 0, d = 0, bias = 0, aux = 0;
};
void add(lt::Algorithm& algorithm, const Alignments& of) {
    algorithm.opaque[0] |= of.a << 32 | of.b << 42 | of.d << 52;
    algorithm.opaque[1] |= of.bias << 40 | of.aux << 50;
}
Alignments take_alignments(lt::Algorithm& algorithm) {
    const auto field = [&](int word, int bit) { return algorithm.opaque[word] >> bit & 0x3FF; };
    const Alignments of{field(0, 32), field(0, 42), field(0, 52), field(1, 40), field(1, 50)};
    algorithm.opaque[0] &= 0xFFFFFFFF;
    algorithm.opaque[1] &= 0xFFFFFFFFFF;
    return of;
}

using namespace ddp::device;

float load_at(const void* memory, lt::DataType type, std::size_t at) {
    switch (type) {
        case lt::DataType::F32:
            return static_cast<const float*>(memory)[at];
        case lt::DataType::BF16:
            return to_float(static_cast<const Bf16*>(memory)[at]);
        case lt::DataType::F16:
            return to_float(static_cast<const F16*>(memory)[at]);
    }
    return 0;
}
void store_at(void* memory, lt::DataType type, std::size_t at, float value) {
    switch (type) {
        case lt::DataType::F32:
            static_cast<float*>(memory)[at] = value;
            return;
        case lt::DataType::BF16:
            static_cast<Bf16*>(memory)[at] = rounded_to<Bf16>(value);
            return;
        case lt::DataType::F16:
            static_cast<F16*>(memory)[at] = rounded_to<F16>(value);
            return;
    }
}

/// To the ten bits of fraction that a TF32 product looks at.
float to_tf32(float value) { return float_of((bits_of(value) + 0x1000U) & ~0x1FFFU); }

/// `length` numbers for each of `count` rows (columns) of the result, one after the other.
std::vector<float> gather(const void* memory, const Layout& layout, std::uint64_t count, std::uint64_t length,
                          bool along_columns, bool tf32) {
    std::vector<float> values(count * length);
    const auto leading = static_cast<std::uint64_t>(layout.leading);
    for (std::uint64_t i = 0; i < count; ++i) {
        for (std::uint64_t x = 0; x < length; ++x) {
            const float value =
                load_at(memory, layout.type, along_columns ? i * leading + x : x * leading + i);
            values[i * length + x] = tf32 ? to_tf32(value) : value;
        }
    }
    return values;
}

float after(const Problem& p, float sum, std::uint64_t row, std::uint64_t column) {
    auto* const mask = static_cast<unsigned char*>(p.desc.aux);
    const std::uint64_t bit = column * static_cast<std::uint64_t>(p.desc.aux_ld) + row;
    const auto flag = static_cast<unsigned char>(1U << (bit % 8));
    switch (p.desc.epilogue) {
        case Epilogue::None:
        case Epilogue::BgradB:
            return sum;
        case Epilogue::Bias:
            return sum + load_at(p.desc.bias, p.d.type, row);
        case Epilogue::ReluBias:
            return std::max(sum + load_at(p.desc.bias, p.d.type, row), 0.0F);
        case Epilogue::ReluAuxBias: {
            const float value = sum + load_at(p.desc.bias, p.d.type, row);
            mask[bit / 8] =
                static_cast<unsigned char>(value > 0 ? mask[bit / 8] | flag : mask[bit / 8] & ~flag);
            return std::max(value, 0.0F);
        }
        case Epilogue::DRelu:
            return (mask[bit / 8] & flag) != 0 ? sum : 0.0F;
    }
    return sum;
}

void run(const Problem& p, Manner manner, const void* a_memory, const void* b_memory, void* d_memory) {
    const bool tf32 = p.desc.compute == lt::ComputeType::Tf32;
    const std::vector<float> a =
        gather(a_memory, p.a, p.m, p.k, p.desc.trans_a == lt::Operation::Transpose, tf32);
    const std::vector<float> b = gather(b_memory, p.b, p.n, p.k, p.desc.trans_b == lt::Operation::None, tf32);
    for (std::uint64_t column = 0; column < p.n; ++column) {
        float of_b = 0;
        for (std::uint64_t x = 0; x < p.k; ++x) of_b += b[column * p.k + x];
        if (p.desc.epilogue == Epilogue::BgradB) store_at(p.desc.bias, p.d.type, column, of_b);
        for (std::uint64_t row = 0; row < p.m; ++row) {
            float sum = 0;
            for (std::uint64_t i = 0; i < p.k; ++i) {
                const std::uint64_t x = manner == Manner::Reverse ? p.k - 1 - i : i;
                sum += a[row * p.k + x] * b[column * p.k + x];
            }
            store_at(d_memory, p.d.type, column * static_cast<std::uint64_t>(p.d.leading) + row,
                     after(p, sum, row, column));
        }
    }
}

bool is_aligned(const void* pointer, std::uint64_t alignment) {
    return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

template <class T>
Code take(T& into, const void* value, std::size_t bytes) {
    if (bytes != sizeof(T)) return refuse(Code::InvalidValue, "an attribute of the wrong size");
    std::memcpy(&into, value, bytes);
    return Code::Success;
}

const Desc& desc_of(lt::MatmulDesc desc) { return *reinterpret_cast<Desc*>(desc); }
const Layout& layout_of(lt::Layout layout) { return *reinterpret_cast<Layout*>(layout); }

}  // namespace
}  // namespace fake

extern "C" {

using fake::Code;
namespace lt = train::lt;

std::size_t cublasLtGetVersion() { return 130100; }
Code cublasLtCreate(lt::Handle* handle) {
    return *handle = reinterpret_cast<lt::Handle>(new int), Code::Success;
}
Code cublasLtDestroy(lt::Handle handle) { return delete reinterpret_cast<int*>(handle), Code::Success; }

Code cublasLtMatmulDescCreate(lt::MatmulDesc* desc, lt::ComputeType compute, lt::DataType scale) {
    if (scale != lt::DataType::F32) return fake::refuse(Code::NotSupported, "a scale type but float32");
    if (compute != lt::ComputeType::F32 && compute != lt::ComputeType::Tf32)
        return fake::refuse(Code::NotSupported, "unknown compute type");
    auto* const made = new fake::Desc;
    made->compute = compute;
    return *desc = reinterpret_cast<lt::MatmulDesc>(made), Code::Success;
}
Code cublasLtMatmulDescDestroy(lt::MatmulDesc desc) {
    return delete reinterpret_cast<fake::Desc*>(desc), Code::Success;
}
Code cublasLtMatmulDescSetAttribute(lt::MatmulDesc desc, lt::MatmulAttribute attribute, const void* value,
                                    std::size_t bytes) {
    auto& mine = *reinterpret_cast<fake::Desc*>(desc);
    switch (attribute) {
        case lt::MatmulAttribute::TransA:
            return fake::take(mine.trans_a, value, bytes);
        case lt::MatmulAttribute::TransB:
            return fake::take(mine.trans_b, value, bytes);
        case lt::MatmulAttribute::Epilogue:
            return fake::take(mine.epilogue, value, bytes);
        case lt::MatmulAttribute::BiasPointer:
            return fake::take(mine.bias, value, bytes);
        case lt::MatmulAttribute::AuxPointer:
            return fake::take(mine.aux, value, bytes);
        case lt::MatmulAttribute::AuxLd:
            return fake::take(mine.aux_ld, value, bytes);
    }
    return fake::refuse(Code::InvalidValue, "unknown attribute of a product");
}

Code cublasLtMatrixLayoutCreate(lt::Layout* layout, lt::DataType type, std::uint64_t rows,
                                std::uint64_t columns, std::int64_t leading) {
    return *layout = reinterpret_cast<lt::Layout>(new fake::Layout{type, rows, columns, leading}),
           Code::Success;
}
Code cublasLtMatrixLayoutDestroy(lt::Layout layout) {
    return delete reinterpret_cast<fake::Layout*>(layout), Code::Success;
}

Code cublasLtMatmulPreferenceCreate(lt::Preference* preference) {
    return *preference = reinterpret_cast<lt::Preference>(new fake::Preference), Code::Success;
}
Code cublasLtMatmulPreferenceDestroy(lt::Preference preference) {
    return delete reinterpret_cast<fake::Preference*>(preference), Code::Success;
}
Code cublasLtMatmulPreferenceSetAttribute(lt::Preference preference, lt::PreferenceAttribute attribute,
                                          const void* value, std::size_t bytes) {
    auto& mine = *reinterpret_cast<fake::Preference*>(preference);
    std::uint32_t ignored = 0;
    switch (attribute) {
        case lt::PreferenceAttribute::MaxWorkspaceBytes:
            return fake::take(mine.workspace, value, bytes);
        case lt::PreferenceAttribute::ReductionSchemeMask:
            return fake::take(mine.reductions, value, bytes);
        case lt::PreferenceAttribute::MinAlignmentC:
            return fake::take(ignored, value, bytes);
        case lt::PreferenceAttribute::MinAlignmentA:
            return fake::take(mine.align_a, value, bytes);
        case lt::PreferenceAttribute::MinAlignmentB:
            return fake::take(mine.align_b, value, bytes);
        case lt::PreferenceAttribute::MinAlignmentD:
            return fake::take(mine.align_d, value, bytes);
    }
    return fake::refuse(Code::InvalidValue, "unknown preference");
}

Code cublasLtMatmulAlgoGetHeuristic(lt::Handle, lt::MatmulDesc desc, lt::Layout a, lt::Layout b, lt::Layout c,
                                    lt::Layout d, lt::Preference preference, int wanted,
                                    lt::Heuristic* results, int* found) {
    *found = 0;
    fake::Problem problem;
    const std::string wrong = fake::fill(problem, fake::desc_of(desc), fake::layout_of(a), fake::layout_of(b),
                                         fake::layout_of(c), fake::layout_of(d));
    if (!wrong.empty() || wanted < 1) return fake::refuse(Code::InvalidValue, wrong);
    const auto& promised = *reinterpret_cast<fake::Preference*>(preference);
    if (problem.d.type != lt::DataType::F32 && (promised.reductions & ~lt::kFloat32Reduction) != 0)
        return fake::refuse(Code::InvalidValue, "pieces of sums could be rounded to 16 bits");
    if (fake::lacks(problem.desc.epilogue)) return Code::NotSupported;
    const std::vector<fake::Offer> offers = fake::offers_for(problem.desc.epilogue);
    for (std::size_t i = 0; i < offers.size() && i < static_cast<std::size_t>(wanted); ++i) {
        const bool is_void = offers[i].manner == fake::Manner::Void;
        results[i] = {fake::algorithm_for(problem, i, offers[i]),
                      offers[i].manner == fake::Manner::Big ? fake::kBig : promised.workspace,
                      is_void ? Code::NotSupported : Code::Success,
                      1.0F,
                      {}};
        // cublasLtMatmul holds the caller to them.
        fake::add(results[i].algorithm,
                  {promised.align_a, promised.align_b, promised.align_d,
                   fake::alignment_of(problem.desc.bias), fake::alignment_of(problem.desc.aux)});
        *found = static_cast<int>(i) + 1;
    }
    return Code::Success;
}

Code cublasLtMatmul(lt::Handle, lt::MatmulDesc desc, const void* alpha, const void* a, lt::Layout a_layout,
                    const void* b, lt::Layout b_layout, const void* beta, const void* c, lt::Layout c_layout,
                    void* d, lt::Layout d_layout, const lt::Algorithm* algorithm, void* workspace,
                    std::size_t workspace_bytes, ddp::cuda::Stream stream) {
    fake::Problem problem;
    const std::string wrong =
        fake::fill(problem, fake::desc_of(desc), fake::layout_of(a_layout), fake::layout_of(b_layout),
                   fake::layout_of(c_layout), fake::layout_of(d_layout));
    if (!wrong.empty()) return fake::refuse(Code::InvalidValue, wrong);
    if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 || c != d)
        return fake::refuse(Code::NotSupported, "anything but D = A B");
    lt::Algorithm chosen = *algorithm;
    const fake::Alignments aligned = fake::take_alignments(chosen);
    if (!fake::is_aligned(a, aligned.a) || !fake::is_aligned(b, aligned.b) || !fake::is_aligned(d, aligned.d))
        return fake::refuse(Code::InvalidValue, "a pointer is less aligned than was promised");
    if (!fake::is_aligned(problem.desc.bias, aligned.bias) ||
        !fake::is_aligned(problem.desc.aux, aligned.aux))
        return fake::refuse(Code::InvalidValue,
                            "bias or mask is less aligned than when the algorithm was chosen");
    const fake::Offer offer = fake::offer_of(chosen);
    const lt::Algorithm right = fake::algorithm_for(problem, fake::number_of(chosen), offer);
    if (std::memcmp(&chosen, &right, sizeof(right)) != 0)
        return fake::refuse(Code::InvalidValue, "the algorithm was chosen for another product");
    ++fake::calls()[fake::number_of(chosen)];
    if (offer.manner == fake::Manner::Refuse) return Code::NotSupported;
    if (offer.manner == fake::Manner::Big || !fake::is_aligned(workspace, 256) || workspace_bytes == 0)
        return fake::refuse(Code::InvalidValue, "the workspace is too small, or not aligned");
    const std::shared_ptr<fake::Stream> on = fake::stream_of(stream);
    on->post([=, weak = std::weak_ptr(on)] {
        fake::run(problem, offer.manner, a, b, d);
        if (const auto running = weak.lock()) running->spend(offer.units * fake::kPretendedUnit);
    });
    return Code::Success;
}

long fake_cublaslt_calls(int number) { return fake::calls()[static_cast<std::size_t>(number)]; }

const char* cublasLtGetStatusString(Code code) {
    switch (code) {
        case Code::Success:
            return "CUBLAS_STATUS_SUCCESS";
        case Code::InvalidValue:
            return "CUBLAS_STATUS_INVALID_VALUE";
        case Code::ArchMismatch:
            return "CUBLAS_STATUS_ARCH_MISMATCH";
        case Code::InternalError:
            return "CUBLAS_STATUS_INTERNAL_ERROR";
        case Code::NotSupported:
            return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "an unknown status";
}

}  // extern "C"
