#include "data.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "csv.h"
#include "ddp/sampler.h"
#include "env/io/file.h"
#include "env/text.h"

namespace train {
namespace {

using ddprun::Errc;
using ddprun::Error;
using ddprun::Result;
using ddprun::Status;

constexpr std::uint64_t kSplitSeed = 10;

Error wrong(const std::string& path, std::string_view what) {
    return {Errc::InvalidArgument, fmt::format("{}: {}", path, what), 0};
}

Result<std::string> read_data(const std::string& path) {
    Result<std::string> content = ddprun::read_regular_file(path, SIZE_MAX);
    if (content || content.error().sys == 0) return content;
    return Error{Errc::NotFound, content.error().what, 0};
}

/// An IDX file of bytes: its dimensions, and its values.
struct Idx {
    std::vector<std::size_t> shape;
    std::string_view bytes;
};

std::size_t big_endian(std::string_view four) {
    std::size_t value = 0;
    for (const char c : four) value = value << 8 | static_cast<unsigned char>(c);
    return value;
}

bool looks_like_idx(std::string_view content) { return content.starts_with(std::string_view("\0\0", 2)); }

Result<Idx> parse_idx(const std::string& path, std::string_view content) {
    constexpr char kUnsignedByte = 0x08;
    if (!looks_like_idx(content) || content.size() < 4) return wrong(path, "not an IDX file");
    if (content[2] != kUnsignedByte)
        return wrong(path, fmt::format("IDX of element type 0x{:02x}; only bytes (0x08) are read",
                                       static_cast<unsigned char>(content[2])));
    const auto dimensions = static_cast<unsigned char>(content[3]);
    if (dimensions == 0 || content.size() < 4 + 4 * std::size_t{dimensions})
        return wrong(path, "truncated: its IDX header is not complete");
    Idx idx;
    std::size_t product = 1;
    for (std::size_t d = 0; d < dimensions; ++d) {
        idx.shape.push_back(big_endian(content.substr(4 + 4 * d, 4)));
        if (__builtin_mul_overflow(product, idx.shape.back(), &product))
            return wrong(path, "its IDX header announces too many bytes");
    }
    idx.bytes = content.substr(4 + 4 * std::size_t{dimensions});
    if (idx.bytes.size() < product)
        return wrong(path, fmt::format("truncated: {} of {} bytes of data", idx.bytes.size(), product));
    if (idx.bytes.size() > product)
        return wrong(path, fmt::format("{} bytes too long for its IDX header", idx.bytes.size() - product));
    return idx;
}

/// The labels' name by MNIST's convention: "train-images-idx3-ubyte" and "train-labels-idx1-ubyte", also with
/// dots. "" for other names.
std::string labels_beside(const std::string& images) {
    for (const auto& [of_images, of_labels] :
         {std::pair{"images-idx3", "labels-idx1"}, {"images.idx3", "labels.idx1"}}) {
        const std::size_t at = images.rfind(of_images);
        if (at != std::string::npos)
            return std::string(images).replace(at, std::strlen(of_images), of_labels);
    }
    return "";
}

Status parse_labels(const std::string& path, std::size_t count, Samples& samples) {
    const Result<std::string> content = read_data(path);
    if (!content) return content.error().with("labels");
    const Result<Idx> idx = parse_idx(path, *content);
    if (!idx) return idx.error();
    if (idx->shape.size() != 1)
        return wrong(path, fmt::format("has {} dimensions; labels have one", idx->shape.size()));
    if (idx->shape[0] != count)
        return wrong(path, fmt::format("{} labels for {} images", idx->shape[0], count));
    for (const char label : idx->bytes) samples.labels.push_back(static_cast<unsigned char>(label));
    return {};
}

Result<Samples> read_idx(const std::string& path, std::string_view content, std::string labels) {
    const Result<Idx> images = parse_idx(path, content);
    if (!images) return images.error();
    if (images->shape.size() < 2) return wrong(path, "has one dimension: these are labels, not images");
    if (labels.empty()) labels = labels_beside(path);
    if (labels.empty()) return wrong(path, "no labels: name them with --labels");
    Samples samples;
    const std::size_t count = images->shape[0];
    samples.features = count == 0 ? 0 : images->bytes.size() / count;
    for (const char pixel : images->bytes) samples.values.push_back(static_cast<unsigned char>(pixel));
    const Status read = parse_labels(labels, count, samples);
    if (!read) return read.error();
    return samples;
}

/// True for content that is no text: an error would otherwise quote binary data without a newline at length.
bool is_binary(std::string_view content) {
    return content.substr(0, 4096).find('\0') != std::string_view::npos;
}

/// Divides all values by the largest magnitude, into [-1, 1].
void divide_by_largest(std::vector<float>& values) {
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::abs(value));
    if (largest == 0) return;
    for (float& value : values) value /= largest;
}

Status finish(const std::string& path, Samples& samples) {
    constexpr std::size_t kFewest = 20;
    if (samples.count() < kFewest)
        return wrong(path, fmt::format("{} samples are too few to train on", samples.count()));
    if (samples.features == 0) return wrong(path, "its samples have no values");
    samples.classes =
        static_cast<std::size_t>(*std::max_element(samples.labels.begin(), samples.labels.end())) + 1;
    if (samples.classes < 2) return wrong(path, "all samples have the same label");
    if (!samples.needs_scaling) divide_by_largest(samples.values);
    samples.name = std::filesystem::path(path).filename();
    samples.name = samples.name.substr(0, samples.name.find_first_of(".-"));
    if (samples.name.empty()) samples.name = "data";
    return {};
}

}  // namespace

std::uint64_t Samples::fingerprint() const {
    std::uint64_t hash = 0xcbf29ce484222325 ^ features ^ classes << 32;
    const auto add = [&hash](const void* bytes, std::size_t count) {
        const auto* next = static_cast<const unsigned char*>(bytes);
        for (std::size_t i = 0; i < count; ++i) hash = (hash ^ next[i]) * 0x100000001b3;
    };
    add(values.data(), values.size() * sizeof(float));
    add(labels.data(), labels.size() * sizeof(std::int32_t));
    return hash;
}

Result<Samples> read_samples(const std::string& path, const std::string& labels) {
    const Result<std::string> content = read_data(path);
    if (!content) return content.error();
    if (content->empty()) return wrong(path, "is empty");
    if (content->starts_with("\x1f\x8b")) return wrong(path, "is compressed; unpack it with gunzip first");
    if (!looks_like_idx(*content) && is_binary(*content)) return wrong(path, "neither IDX nor CSV");
    Result<Samples> samples =
        looks_like_idx(*content) ? read_idx(path, *content, labels) : read_csv(path, *content);
    if (!samples) return samples.error();
    const Status finished = finish(path, *samples);
    if (!finished) return finished.error();
    return samples;
}

Result<std::string> find_digits() {
    namespace fs = std::filesystem;
    constexpr const char* kName = "digits-images-idx3-ubyte";
    std::error_code error;
    const fs::path beside = ddprun::own_directory();
    // TRAIN_DATADIR is relative to the program's folder, so that an installation can be moved.
    const std::vector<fs::path> places = {beside / kName,
                                          (beside / TRAIN_DATADIR / kName).lexically_normal()};
    for (const fs::path& place : places) {
        if (fs::exists(place, error)) return place.string();
    }
    return Error{Errc::NotFound,
                 fmt::format("the digits are neither {} nor {}; name a file with --data", places[0].string(),
                             places[1].string()),
                 0};
}

std::vector<std::size_t> Subset::field_bytes() const {
    return {samples_.features * sizeof(float), sizeof(std::int32_t)};
}

void Subset::read(std::size_t index, std::span<const std::span<std::byte>> fields) const {
    const std::size_t row = rows_.at(index);
    std::memcpy(fields[0].data(), samples_.values.data() + row * samples_.features, fields[0].size());
    std::memcpy(fields[1].data(), &samples_.labels[row], sizeof(std::int32_t));
}

Split split_samples(std::size_t count) {
    const std::vector<std::size_t> order = ddp::random_permutation(count, kSplitSeed);
    const auto held_out = static_cast<std::ptrdiff_t>(count / 10);
    return {{order.begin() + held_out, order.end()}, {order.begin(), order.begin() + held_out}};
}

}  // namespace train
