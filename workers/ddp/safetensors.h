#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ddp/tensor.h"
#include "env/unique_fd.h"

namespace ddp {

using Metadata = std::map<std::string, std::string>;

/// Largest header that is read or written (the format's own limit).
inline constexpr std::uint64_t kSafetensorsHeaderLimit = 100'000'000;

/// Writes a safetensors file (readable by Python's safetensors, Hugging Face and others) and syncs it to the
/// disk. Tensors lie in the file in the order given, the first at a multiple of 64 bytes. Not atomic: a
/// reader may see half of it; see checkpoint.h. Throws Error naming path and cause; what was written is
/// removed.
void write_safetensors(const std::string& path, std::span<const Tensor> tensors,
                       const Metadata& metadata = {});

/// A safetensors file, open for reading. Nothing in the file is trusted: every size and offset is checked
/// when it is opened.
class SafetensorsFile {
  public:
    struct Entry {
        DType dtype = DType::F32;
        std::vector<std::int64_t> shape;
        std::uint64_t offset = 0;  ///< from the beginning of the file
        std::uint64_t bytes = 0;
    };

    /// Throws InvalidInput naming the path and what is wrong with it, Error when it cannot be read.
    static SafetensorsFile open(const std::string& path);

    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const Metadata& metadata() const { return metadata_; }

    /// Throws InvalidInput, naming the first tensor that differs and both shapes, unless the file holds
    /// exactly these tensors.
    void require_same(std::span<const Tensor> tensors) const;
    /// require_same, then fills their memory. A throw after the check (the disk fails) leaves them half
    /// filled.
    void read_into(std::span<const Tensor> tensors) const;

  private:
    explicit SafetensorsFile(std::string path) : path_(std::move(path)) {}
    void read_header();
    void parse_header(const std::string& header, std::uint64_t data_begin, std::uint64_t file_bytes);
    [[noreturn]] void refuse(const std::string& what) const;

    std::string path_;
    ddprun::UniqueFd fd_;
    std::map<std::string, Entry> entries_;
    Metadata metadata_;
};

}  // namespace ddp
