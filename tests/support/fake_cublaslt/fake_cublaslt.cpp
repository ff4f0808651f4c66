// The entry points of cuBLASLt that train calls, over host memory and the streams of fake_cuda. Exactly the
// descriptors, layouts and epilogues that train uses; anything else is refused, and said on stderr.
//
// FAKE_CUBLASLT  what this one lacks, as it does on some chips: epilogues by number ("134,512"), or "all"
#include <algorithm>
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

/// What the algorithm was chosen for: another problem may not use it.
lt::Algorithm algorithm_for(const Problem& p) {
    return {{0xcb1a51, static_cast<std::uint64_t>(p.desc.epilogue), p.m, p.n, p.k,
             static_cast<std::uint64_t>(p.a.leading), static_cast<std::uint64_t>(p.b.leading),
             static_cast<std::uint64_t>(p.d.leading)}};
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

void run(const Problem& p, const void* a_memory, const void* b_memory, void* d_memory) {
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
            for (std::uint64_t x = 0; x < p.k; ++x) sum += a[row * p.k + x] * b[column * p.k + x];
            store_at(d_memory, p.d.type, column * static_cast<std::uint64_t>(p.d.leading) + row,
                     after(p, sum, row, column));
        }
    }
}

bool is_aligned(const void* pointer, std::uint32_t alignment) {
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
    if (!wrong.empty() || wanted != 1) return fake::refuse(Code::InvalidValue, wrong);
    if (fake::lacks(problem.desc.epilogue)) return Code::NotSupported;
    results[0] = {fake::algorithm_for(problem), 0, Code::Success, 1.0F, {}};
    // The alignments that were promised: cublasLtMatmul holds the caller to them.
    const auto& promised = *reinterpret_cast<fake::Preference*>(preference);
    results[0].algorithm.opaque[0] |= std::uint64_t{promised.align_a} << 32 |
                                      std::uint64_t{promised.align_b} << 42 |
                                      std::uint64_t{promised.align_d} << 52;
    return *found = 1, Code::Success;
}

Code cublasLtMatmul(lt::Handle, lt::MatmulDesc desc, const void* alpha, const void* a, lt::Layout a_layout,
                    const void* b, lt::Layout b_layout, const void* beta, const void* c, lt::Layout c_layout,
                    void* d, lt::Layout d_layout, const lt::Algorithm* algorithm, void*, std::size_t,
                    ddp::cuda::Stream stream) {
    fake::Problem problem;
    const std::string wrong =
        fake::fill(problem, fake::desc_of(desc), fake::layout_of(a_layout), fake::layout_of(b_layout),
                   fake::layout_of(c_layout), fake::layout_of(d_layout));
    if (!wrong.empty()) return fake::refuse(Code::InvalidValue, wrong);
    if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 || c != d)
        return fake::refuse(Code::NotSupported, "anything but D = A B");
    lt::Algorithm chosen = *algorithm;
    const auto align = [&](int bit) { return static_cast<std::uint32_t>(chosen.opaque[0] >> bit & 0x3FF); };
    if (!fake::is_aligned(a, align(32)) || !fake::is_aligned(b, align(42)) || !fake::is_aligned(d, align(52)))
        return fake::refuse(Code::InvalidValue, "a pointer is less aligned than was promised");
    chosen.opaque[0] &= 0xFFFFFFFF;
    const lt::Algorithm right = fake::algorithm_for(problem);
    if (std::memcmp(&chosen, &right, sizeof(right)) != 0)
        return fake::refuse(Code::InvalidValue, "the algorithm was chosen for another product");
    fake::stream_of(stream)->post([=] { fake::run(problem, a, b, d); });
    return Code::Success;
}

const char* cublasLtGetStatusString(Code code) {
    switch (code) {
        case Code::Success:
            return "CUBLAS_STATUS_SUCCESS";
        case Code::InvalidValue:
            return "CUBLAS_STATUS_INVALID_VALUE";
        case Code::NotSupported:
            return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_INTERNAL_ERROR";
}

}  // extern "C"
