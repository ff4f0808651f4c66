#include "ddp/safetensors.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "ddp/durable_file.h"

// Tensors are written as they lie in memory, and the format is little-endian.
static_assert(std::endian::native == std::endian::little);

namespace ddp {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kPrefixBytes = 8;
constexpr std::size_t kAlignment = 64;
constexpr const char* kMetadataKey = "__metadata__";

constexpr std::array<std::pair<DType, const char*>, 7> kNames = {{{DType::F32, "F32"},
                                                                  {DType::F64, "F64"},
                                                                  {DType::I32, "I32"},
                                                                  {DType::I64, "I64"},
                                                                  {DType::BF16, "BF16"},
                                                                  {DType::F16, "F16"},
                                                                  {DType::U8, "U8"}}};

const char* format_name(DType dtype) {
    return std::find_if(kNames.begin(), kNames.end(), [&](const auto& n) { return n.first == dtype; })
        ->second;
}

std::optional<DType> dtype_named(const std::string& name) {
    for (const auto& [dtype, known] : kNames) {
        if (name == known) return dtype;
    }
    return std::nullopt;
}

std::string make_header(std::span<const Tensor> tensors, const Metadata& metadata) {
    Json header = Json::object();
    if (!metadata.empty()) header[kMetadataKey] = metadata;
    std::uint64_t offset = 0;
    for (const Tensor& tensor : tensors) {
        const std::uint64_t end = offset + tensor.memory.bytes();
        header[tensor.name] = {{"dtype", format_name(tensor.memory.dtype)},
                               {"shape", tensor.shape},
                               {"data_offsets", {offset, end}}};
        offset = end;
    }
    // Names are the caller's bytes; a byte that is not UTF-8 must not end the program.
    std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
    while ((kPrefixBytes + text.size()) % kAlignment != 0) text += ' ';
    return text;
}

/// The dimensions, if they are non-negative integers whose product times the element size fits 64 bits.
std::optional<std::pair<std::vector<std::int64_t>, std::uint64_t>> parse_shape(const Json& json,
                                                                               DType dtype) {
    if (!json.is_array()) return std::nullopt;
    std::vector<std::int64_t> shape;
    std::uint64_t bytes = size_of(dtype);
    for (const Json& extent : json) {
        if (!extent.is_number_unsigned()) return std::nullopt;
        const auto value = extent.get<std::uint64_t>();
        if (value > INT64_MAX || __builtin_mul_overflow(bytes, value, &bytes)) return std::nullopt;
        shape.push_back(static_cast<std::int64_t>(value));
    }
    return std::pair{std::move(shape), bytes};
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> parse_offsets(const Json& json) {
    if (!json.is_array() || json.size() != 2) return std::nullopt;
    if (!json[0].is_number_unsigned() || !json[1].is_number_unsigned()) return std::nullopt;
    return std::pair{json[0].get<std::uint64_t>(), json[1].get<std::uint64_t>()};
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const Tensor> tensors, const Metadata& metadata) {
    check_tensors(tensors);
    for (const Tensor& tensor : tensors) {
        if (tensor.name == kMetadataKey)
            throw InvalidInput(fmt::format("{}: a tensor cannot be named '{}'", path, kMetadataKey));
        if (tensor.memory.device != Device{})
            throw InvalidInput(fmt::format("{}: tensor '{}' is not in host memory", path, tensor.name));
    }
    const std::string header = make_header(tensors, metadata);
    if (header.size() > kSafetensorsHeaderLimit)
        throw InvalidInput(fmt::format("{}: {} tensors need a header of {} bytes, the limit is {}", path,
                                       tensors.size(), header.size(), kSafetensorsHeaderLimit));
    DurableFile file(path);
    const std::uint64_t header_bytes = header.size();
    file.write(&header_bytes, sizeof(header_bytes));
    file.write(header.data(), header.size());
    for (const Tensor& tensor : tensors) file.write(tensor.memory.data, tensor.memory.bytes());
    file.commit();
}

void SafetensorsFile::refuse(const std::string& what) const { throw InvalidInput(path_ + ": " + what); }

SafetensorsFile SafetensorsFile::open(const std::string& path) {
    SafetensorsFile file(path);
    file.fd_ = ddprun::UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.fd_) throw Error(fmt::format("{}: {}", path, std::strerror(errno)));
    file.read_header();
    return file;
}

void SafetensorsFile::read_header() {
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) throw Error(fmt::format("{}: {}", path_, std::strerror(errno)));
    if (!S_ISREG(status.st_mode)) refuse("not a regular file");
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    if (file_bytes < kPrefixBytes) refuse(fmt::format("not a safetensors file: only {} bytes", file_bytes));
    std::uint64_t header_bytes = 0;
    read_at(fd_.get(), path_, 0, {reinterpret_cast<std::byte*>(&header_bytes), sizeof(header_bytes)});
    if (header_bytes > kSafetensorsHeaderLimit)
        refuse(fmt::format("not a safetensors file: a header of {} bytes, the limit is {}", header_bytes,
                           kSafetensorsHeaderLimit));
    if (header_bytes > file_bytes - kPrefixBytes)
        refuse(fmt::format("truncated: the header has {} bytes, the file only {}", header_bytes, file_bytes));
    std::string header(header_bytes, '\0');
    read_at(fd_.get(), path_, kPrefixBytes, std::as_writable_bytes(std::span(header)));
    parse_header(header, kPrefixBytes + header_bytes, file_bytes);
}

void SafetensorsFile::parse_header(const std::string& header, std::uint64_t data_begin,
                                   std::uint64_t file_bytes) {
    const Json json = Json::parse(header, nullptr, false);
    if (!json.is_object()) refuse("not a safetensors file: its header is not a JSON object");
    const std::uint64_t data_bytes = file_bytes - data_begin;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    for (const auto& [name, item] : json.items()) {
        if (name == kMetadataKey) {
            if (!item.is_object()) refuse("its metadata is not an object of strings");
            for (const auto& [key, value] : item.items()) {
                if (!value.is_string()) refuse(fmt::format("its metadata '{}' is not a string", key));
                metadata_[key] = value.get<std::string>();
            }
            continue;
        }
        if (!item.is_object() || !item.contains("dtype") || !item["dtype"].is_string() ||
            !item.contains("shape") || !item.contains("data_offsets"))
            refuse(fmt::format("tensor '{}' has no dtype, shape or data_offsets", name));
        const auto dtype = dtype_named(item["dtype"].get<std::string>());
        if (!dtype)
            refuse(
                fmt::format("tensor '{}' has type {}, which is not supported", name, item["dtype"].dump()));
        const auto shape = parse_shape(item["shape"], *dtype);
        if (!shape) refuse(fmt::format("tensor '{}' has a malformed shape", name));
        const auto offsets = parse_offsets(item["data_offsets"]);
        if (!offsets || offsets->first > offsets->second)
            refuse(fmt::format("tensor '{}' has malformed offsets", name));
        const auto [begin, end] = *offsets;
        if (end > data_bytes)
            refuse(fmt::format("truncated: tensor '{}' ends at byte {} of the data, the file holds {}", name,
                               end, data_bytes));
        if (end - begin != shape->second)
            refuse(fmt::format("tensor '{}' has {} bytes, its shape {} needs {}", name, end - begin,
                               describe(*dtype, shape->first), shape->second));
        entries_[name] = {*dtype, shape->first, data_begin + begin, end - begin};
        ranges.emplace_back(begin, end);
    }
    // No holes and no overlaps: the format demands it, and it is what makes a file mean one thing only.
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t expected = 0;
    for (const auto& [begin, end] : ranges) {
        if (begin != expected) refuse(fmt::format("a hole or an overlap at byte {} of the data", expected));
        expected = end;
    }
    if (expected != data_bytes)
        refuse(fmt::format("its tensors take {} bytes, the file holds {}", expected, data_bytes));
}

void SafetensorsFile::require_same(std::span<const Tensor> tensors) const {
    check_tensors(tensors);
    for (const Tensor& tensor : tensors) {
        const auto found = entries_.find(tensor.name);
        if (found == entries_.end())
            refuse(fmt::format("tensor '{}' is missing there, {} in this program", tensor.name,
                               describe(tensor)));
        const Entry& entry = found->second;
        if (entry.dtype != tensor.memory.dtype || entry.shape != tensor.shape)
            refuse(fmt::format("tensor '{}' is {} there, {} in this program", tensor.name,
                               describe(entry.dtype, entry.shape), describe(tensor)));
    }
    if (entries_.size() == tensors.size()) return;
    for (const auto& [name, entry] : entries_) {
        const bool known =
            std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.name == name; });
        if (!known)
            refuse(fmt::format("tensor '{}' is {} there, missing in this program", name,
                               describe(entry.dtype, entry.shape)));
    }
}

void SafetensorsFile::read_into(std::span<const Tensor> tensors) const {
    require_same(tensors);
    for (const Tensor& tensor : tensors)
        read_at(fd_.get(), path_, entries_.at(tensor.name).offset,
                {static_cast<std::byte*>(tensor.memory.data), tensor.memory.bytes()});
}

}  // namespace ddp
