#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "ddp/checkpoint.h"
#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/shards.h"
#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"

// Tensors are written in memory order, and the format is little-endian.
static_assert(std::endian::native == std::endian::little);

namespace ddp {
namespace {

using ddprun::as;
using ddprun::elements;
using ddprun::excerpt;
using ddprun::Json;
using ddprun::member;
using ddprun::members;
using ddprun::Result;
using ddprun::text_of;

constexpr std::size_t kPrefixBytes = 8;
constexpr std::size_t kDataAlignment = 64;
/// NumPy and PyTorch allow 64 dimensions.
constexpr std::size_t kMaxDimensions = 64;
constexpr const char* kMetadataKey = "__metadata__";
/// Prefix that PyTorch's DistributedDataParallel adds to the names of a model.
constexpr std::string_view kWrapper = "module.";

constexpr std::array<std::pair<DType, const char*>, kDTypes> kNames = {{{DType::F32, "F32"},
                                                                        {DType::F64, "F64"},
                                                                        {DType::I32, "I32"},
                                                                        {DType::I64, "I64"},
                                                                        {DType::BF16, "BF16"},
                                                                        {DType::F16, "F16"},
                                                                        {DType::U8, "U8"},
                                                                        {DType::I8, "I8"},
                                                                        {DType::Bool, "BOOL"}}};

/// The format's types that libddp lacks, with the bits of an element: a tensor of one does not hinder those
/// who read others.
constexpr std::pair<std::string_view, std::uint64_t> kOtherTypes[] = {
    {"I16", 16},    {"U16", 16},    {"U32", 32},    {"U64", 64},        {"C64", 64},
    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};

/// The bits of an element of a type of the format; nullopt for an unknown one.
std::optional<std::uint64_t> bits_of(std::string_view type) {
    for (const auto& [name, bits] : kOtherTypes) {
        if (name == type) return bits;
    }
    for (const auto& [dtype, name] : kNames) {
        if (name == type) return 8 * size_of(dtype);
    }
    return std::nullopt;
}

std::string describe(const SafetensorsFile::Entry& entry) {
    const std::string known = describe(entry.dtype, entry.shape);
    return entry.other_type.empty() ? known : entry.other_type + known.substr(known.find('['));
}

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
    std::vector<std::pair<std::string, Json>> header;
    if (!metadata.empty()) header.emplace_back(kMetadataKey, metadata);
    std::uint64_t offset = 0;
    for (const Tensor& tensor : tensors) {
        const std::uint64_t end = offset + tensor.memory.bytes();
        header.emplace_back(tensor.name, Json{{"dtype", format_name(tensor.memory.dtype)},
                                              {"shape", tensor.shape},
                                              {"data_offsets", Json::array({offset, end})}});
        offset = end;
    }
    // Names are the caller's bytes; a byte that is not UTF-8 must not end the program.
    std::string text = ddprun::to_text(ddprun::json_object(std::move(header)));
    while ((kPrefixBytes + text.size()) % kDataAlignment != 0) text += ' ';
    return text;
}

/// The dimensions and the bytes, if the dimensions are non-negative integers whose product times the bits of
/// an element fits 64 bits, and makes whole bytes.
std::optional<std::pair<std::vector<std::int64_t>, std::uint64_t>> parse_shape(const Json& json,
                                                                               std::uint64_t bits) {
    if (!json.is_array() || json.size() > kMaxDimensions) return std::nullopt;
    std::vector<std::int64_t> shape;
    for (const Json& extent : elements(json)) {
        const Result<std::int64_t> value = as<std::int64_t>(extent);
        if (!value || *value < 0 || __builtin_mul_overflow(bits, static_cast<std::uint64_t>(*value), &bits))
            return std::nullopt;
        shape.push_back(*value);
    }
    if (bits % 8 != 0) return std::nullopt;
    return std::pair{std::move(shape), bits / 8};
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> parse_offsets(const Json& json) {
    if (elements(json).size() != 2) return std::nullopt;
    const Result<std::uint64_t> begin = as<std::uint64_t>(json[0]), end = as<std::uint64_t>(json[1]);
    if (!begin || !end) return std::nullopt;
    return std::pair{*begin, *end};
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const Tensor> tensors, const Metadata& metadata) {
    DurableFile file(path);
    write_safetensors(file, tensors, metadata);
}

namespace {

/// Writes the beginning of a file, before the tensors' bytes.
void write_header(DurableFile& file, std::span<const Tensor> tensors, const Metadata& metadata) {
    const std::string header = make_header(tensors, metadata);
    if (header.size() > kSafetensorsHeaderLimit)
        throw InvalidInput(fmt::format("{}: {} tensors need a header of {} bytes, the limit is {}",
                                       file.path(), tensors.size(), header.size(), kSafetensorsHeaderLimit));
    const std::uint64_t header_bytes = header.size();
    file.write(&header_bytes, sizeof(header_bytes));
    file.write(header.data(), header.size());
}

}  // namespace

void require_whole(const std::string& path, std::span<const Tensor> tensors) {
    for (const Tensor& tensor : tensors) {
        if (tensor.part_begin)
            throw InvalidInput(fmt::format(
                "{}: only a part of tensor '{}' is here: save a sharded model with a CheckpointDirectory, "
                "and load it with that or load_weights(group, path, model), on all ranks",
                path, tensor.name));
    }
}

void write_safetensors(DurableFile& file, std::span<const Tensor> tensors, const Metadata& metadata) {
    const std::string& path = file.path();
    check_tensors(tensors);
    for (const Tensor& tensor : tensors) {
        if (tensor.name == kMetadataKey)
            throw InvalidInput(fmt::format("{}: a tensor cannot be named '{}'", path, kMetadataKey));
        if (tensor.memory.device != Device{})
            throw InvalidInput(fmt::format("{}: tensor '{}' is not in host memory", path, tensor.name));
    }
    require_whole(path, tensors);
    write_header(file, tensors, metadata);
    for (const Tensor& tensor : tensors) file.write(tensor.memory.data, tensor.memory.bytes());
    file.commit();
}

void join_shards(const std::string& index, const std::string& path) {
    constexpr std::size_t kChunkBytes = 8 << 20;
    const SafetensorsFile shards = SafetensorsFile::open(index);
    Metadata metadata = shards.metadata();
    metadata.erase(kSaveKey);
    std::vector<Tensor> tensors;
    for (const auto& [name, entry] : shards.entries()) {
        if (!entry.other_type.empty())
            shards.refuse(fmt::format("tensor '{}' has type '{}', which is not supported", excerpt(name),
                                      entry.other_type));
        tensors.push_back(
            {name, entry.shape, {nullptr, entry.bytes / size_of(entry.dtype), entry.dtype, {}}});
    }
    DurableFile file(path);
    write_header(file, tensors, metadata);
    std::vector<std::byte> chunk(kChunkBytes);
    for (const auto& [name, entry] : shards.entries()) {
        for (std::uint64_t at = 0; at < entry.bytes; at += kChunkBytes) {
            const auto part = std::span(chunk).first(std::min(kChunkBytes, entry.bytes - at));
            read_at(shards.files_[entry.file]->get(), index, entry.offset + at, part);
            file.write(part.data(), part.size());
        }
    }
    file.commit();
}

void SafetensorsFile::refuse(const std::string& what) const { throw InvalidInput(path_ + ": " + what); }

SafetensorsFile SafetensorsFile::open(const std::string& path) {
    SafetensorsFile file(path);
    if (path.ends_with(kIndexSuffix)) {
        file.read_index();
        return file;
    }
    Result<ddprun::UniqueFd> fd = ddprun::open_regular_file(path);
    if (!fd && fd.error().code == ddprun::Errc::InvalidArgument) throw InvalidInput(fd.error().what);
    if (!fd) throw Error(fd.error().what);
    file.files_.push_back(std::make_shared<const ddprun::UniqueFd>(*std::move(fd)));
    file.read_header();
    return file;
}

void SafetensorsFile::read_index() {
    const Result<std::string> text = ddprun::read_regular_file(path_, kSafetensorsHeaderLimit);
    if (!text) throw InvalidInput(text.error().what);
    const Result<Json> json = ddprun::parse_json(*text, {.unique_names = true});
    if (!json || !member(*json, "weight_map").is_object()) refuse("not an index of safetensors files");
    const Json &about = member(*json, "metadata"), &map = member(*json, "weight_map");
    const std::string save = text_of(about, kSaveKey);
    std::map<std::string, std::size_t> numbers;
    for (const auto& [tensor, item] : members(map)) {
        const std::string file = as<std::string>(item).value_or("");
        if (!file.ends_with(kFileSuffix) || file.find('/') != std::string::npos)
            refuse(fmt::format("'{}', the file of tensor '{}', is no name of a safetensors file",
                               excerpt(file), excerpt(tensor)));
        if (numbers.try_emplace(file, files_.size()).second) add_shard(file, save);
        const auto entry = entries_.find(tensor);
        if (entry == entries_.end() || entry->second.file != numbers[file])
            refuse(fmt::format("tensor '{}' is not in its file {}", excerpt(tensor), excerpt(file)));
    }
    if (entries_.size() != members(map).size())
        refuse(fmt::format("lists {} tensors, its files hold {}", members(map).size(), entries_.size()));
    std::uint64_t bytes = 0;
    for (const auto& [name, entry] : entries_) bytes += entry.bytes;
    // Other programs count the bytes in other ways.
    if (!save.empty() && as<std::uint64_t>(about, kTotalKey).value_or(0) != bytes)
        refuse(fmt::format("its files hold {} bytes of tensors, it says another number", bytes));
}

/// Adds the tensors of a file that the index names. Every file of a checkpoint names its save.
void SafetensorsFile::add_shard(const std::string& name, const std::string& save) {
    const std::filesystem::path path = std::filesystem::path(path_).parent_path() / name;
    if (!std::filesystem::exists(path)) refuse(fmt::format("its file {} is missing", excerpt(name)));
    SafetensorsFile shard = open(path);
    if (!save.empty() && shard.metadata_[kSaveKey] != save) shard.refuse("is of another save than " + path_);
    for (auto& [tensor, entry] : shard.entries_) {
        entry.file = files_.size();
        if (!entries_.try_emplace(tensor, entry).second)
            shard.refuse(fmt::format("tensor '{}' is in another file of {} too", excerpt(tensor), path_));
    }
    metadata_ = std::move(shard.metadata_);
    files_.push_back(std::move(shard.files_[0]));
}

void SafetensorsFile::read_header() {
    struct stat status {};
    const int fd = files_[0]->get();
    if (::fstat(fd, &status) != 0) throw Error(fmt::format("{}: {}", path_, std::strerror(errno)));
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    if (file_bytes < kPrefixBytes) refuse(fmt::format("not a safetensors file: only {} bytes", file_bytes));
    std::uint64_t header_bytes = 0;
    read_at(fd, path_, 0, {reinterpret_cast<std::byte*>(&header_bytes), sizeof(header_bytes)});
    if (header_bytes > kSafetensorsHeaderLimit)
        refuse(fmt::format("not a safetensors file: a header of {} bytes, the limit is {}", header_bytes,
                           kSafetensorsHeaderLimit));
    if (header_bytes > file_bytes - kPrefixBytes)
        refuse(fmt::format("truncated: the header has {} bytes, the file only {}", header_bytes, file_bytes));
    std::string header(header_bytes, '\0');
    read_at(fd, path_, kPrefixBytes, std::as_writable_bytes(std::span(header)));
    parse_header(header, kPrefixBytes + header_bytes, file_bytes);
}

void SafetensorsFile::parse_header(const std::string& header, std::uint64_t data_begin,
                                   std::uint64_t file_bytes) {
    const Result<Json> json = ddprun::parse_json(header, {.unique_names = true});
    if (!json) refuse("not a safetensors file: its header is not a JSON object: " + json.error().what);
    if (!json->is_object()) refuse("not a safetensors file: its header is not a JSON object");
    const std::uint64_t data_bytes = file_bytes - data_begin;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    for (const auto& [name, item] : members(*json)) {
        if (name == kMetadataKey) {
            if (!item.is_object()) refuse("its metadata is not an object of strings");
            for (const auto& [key, value] : members(item)) {
                const Result<std::string> text = as<std::string>(value);
                if (!text) refuse(fmt::format("its metadata '{}' is not a string", excerpt(key)));
                metadata_[key] = *text;
            }
            continue;
        }
        const Result<std::string> type = as<std::string>(item, "dtype");
        if (!type || !item.contains("shape") || !item.contains("data_offsets"))
            refuse(fmt::format("tensor '{}' has no dtype, shape or data_offsets", excerpt(name)));
        const auto dtype = dtype_named(*type);
        const auto bits = bits_of(*type);
        if (!bits)
            refuse(fmt::format("tensor '{}' has type '{}', which is not supported", excerpt(name),
                               excerpt(*type)));
        const auto shape = parse_shape(item["shape"], *bits);
        if (!shape) refuse(fmt::format("tensor '{}' has a malformed shape", excerpt(name)));
        const auto offsets = parse_offsets(item["data_offsets"]);
        if (!offsets || offsets->first > offsets->second)
            refuse(fmt::format("tensor '{}' has malformed offsets", excerpt(name)));
        const auto [begin, end] = *offsets;
        if (end > data_bytes)
            refuse(fmt::format("truncated: tensor '{}' ends at byte {} of the data, the file holds {}",
                               excerpt(name), end, data_bytes));
        const Entry entry{dtype.value_or(DType::U8), dtype ? "" : *type, shape->first, data_begin + begin,
                          end - begin};
        if (end - begin != shape->second)
            refuse(fmt::format("tensor '{}' has {} bytes, its shape {} needs {}", excerpt(name), end - begin,
                               describe(entry), shape->second));
        entries_[name] = entry;
        ranges.emplace_back(begin, end);
    }
    // The format forbids holes and overlaps: they would make a file ambiguous.
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t expected = 0;
    for (const auto& [begin, end] : ranges) {
        if (begin != expected) refuse(fmt::format("a hole or an overlap at byte {} of the data", expected));
        expected = end;
    }
    if (expected != data_bytes)
        refuse(fmt::format("its tensors take {} bytes, the file holds {}", expected, data_bytes));
}

const SafetensorsFile::Entry* SafetensorsFile::find(const std::string& name) const {
    for (const std::string& spelling : {name, std::string(kWrapper) + name}) {
        if (const auto found = entries_.find(spelling); found != entries_.end()) return &found->second;
    }
    return nullptr;
}

void SafetensorsFile::require_fit(const Tensor& tensor, const Entry& entry) const {
    if (entry.other_type.empty() && entry.dtype == tensor.memory.dtype && entry.shape == tensor.shape) return;
    refuse(fmt::format("tensor '{}' is {} there, {} in this program", tensor.name, describe(entry),
                       describe(tensor)));
}

void SafetensorsFile::read(const Tensor& tensor, const Entry& entry) const {
    const std::uint64_t begin = tensor.part_begin.value_or(0) * size_of(entry.dtype);
    read_at(files_[entry.file]->get(), path_, entry.offset + begin,
            {static_cast<std::byte*>(tensor.memory.data), tensor.memory.bytes()});
}

void SafetensorsFile::require_same(std::span<const Tensor> tensors) const {
    check_tensors(tensors);
    std::unordered_set<const Entry*> used;
    for (const Tensor& tensor : tensors) {
        const Entry* const entry = find(tensor.name);
        if (entry == nullptr)
            refuse(fmt::format("tensor '{}' is missing there, {} in this program", tensor.name,
                               describe(tensor)));
        require_fit(tensor, *entry);
        used.insert(entry);
    }
    for (const auto& [name, entry] : entries_) {
        if (!used.contains(&entry))
            refuse(fmt::format("tensor '{}' is {} there, missing in this program", excerpt(name),
                               describe(entry)));
    }
}

void SafetensorsFile::read_into(std::span<const Tensor> tensors) const {
    require_whole(path_, tensors);
    require_same(tensors);
    fill(tensors);
}

void SafetensorsFile::fill(std::span<const Tensor> tensors) const {
    for (const Tensor& tensor : tensors) read(tensor, *find(tensor.name));
}

SafetensorsFile::Unmatched SafetensorsFile::read_matching(std::span<const Tensor> tensors,
                                                          const Rename& rename) const {
    require_whole(path_, tensors);
    return fill_matching(tensors, rename);
}

SafetensorsFile::Unmatched SafetensorsFile::fill_matching(std::span<const Tensor> tensors,
                                                          const Rename& rename) const {
    check_tensors(tensors);
    Unmatched unmatched;
    std::vector<std::pair<const Tensor*, const Entry*>> pairs;
    std::unordered_set<const Entry*> used;
    for (const Tensor& tensor : tensors) {
        const Entry* const entry = find(rename ? rename(tensor.name) : tensor.name);
        if (entry == nullptr) {
            unmatched.missing.push_back(tensor.name);
            continue;
        }
        require_fit(tensor, *entry);
        pairs.emplace_back(&tensor, entry);
        used.insert(entry);
    }
    for (const auto& [tensor, entry] : pairs) read(*tensor, *entry);
    for (const auto& [name, entry] : entries_) {
        if (!used.contains(&entry)) unmatched.unused.push_back(name);
    }
    return unmatched;
}

}  // namespace ddp
