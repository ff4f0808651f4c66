#include "ddp/recovery/kept.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <optional>
#include <utility>

#include "ddp/cuda/host_copies.h"
#include "ddp/reduce/loops.h"
#include "env/text.h"

namespace ddp {

using ddprun::KeptHeader;
using ddprun::KeptLine;

namespace {

std::string_view memory_of(const Tensor& tensor) {
    return {static_cast<const char*>(tensor.memory.data), tensor.memory.bytes()};
}

/// The tensors where the host can read and write them: in place, or copies of those on a device.
class OnHost {
  public:
    using Begin = cuda::HostCopies::Begin;
    OnHost(const std::vector<Tensor>& tensors, Begin begin) : tensors_(tensors) {
        if (std::ranges::any_of(tensors, [](const Tensor& one) { return one.memory.device != Device{}; }))
            copies_.emplace(tensors, begin);
    }
    [[nodiscard]] std::span<const Tensor> tensors() const { return copies_ ? copies_->tensors() : tensors_; }
    void upload() const {
        if (copies_) copies_->upload();
    }

  private:
    std::span<const Tensor> tensors_;
    std::optional<cuda::HostCopies> copies_;
};

/// A text in a copy begins with its length.
void append_text(std::string& copy, const std::string& text) {
    const std::uint64_t length = text.size();
    copy.append(reinterpret_cast<const char*>(&length), sizeof length);
    copy += text;
}

/// Reads a copy from its beginning.
class CopyReader {
  public:
    explicit CopyReader(std::string_view copy) : rest_(copy) {}
    std::string_view take(std::size_t bytes) {
        // Copies are made and read by the same declarations.
        if (bytes > rest_.size()) throw Error("recovery: a copy of the kept state is shorter than the state");
        const std::string_view piece = rest_.substr(0, bytes);
        rest_.remove_prefix(bytes);
        return piece;
    }
    std::string take_text() {
        std::uint64_t length = 0;
        std::memcpy(&length, take(sizeof length).data(), sizeof length);
        return std::string(take(length));
    }

  private:
    std::string_view rest_;
};

bool is_of_all(const KeptItem& item) { return item.kind != Recovery::Kind::Own; }

/// Calls `visit` for each tensor of the items of this kind, in host memory, and with null for a text. Leaves
/// the tensors out that are on the device `but`.
template <class Visit>
void for_each_piece(std::span<const KeptItem> items, Recovery::Kind kind, OnHost::Begin begin,
                    const Device* but, Visit visit) {
    for (const KeptItem& item : items) {
        if (item.kind != kind) continue;
        std::vector<Tensor> others;
        if (but != nullptr)
            std::ranges::copy_if(item.tensors, std::back_inserter(others),
                                 [&](const Tensor& one) { return one.memory.device != *but; });
        const OnHost host(but == nullptr ? item.tensors : others, begin);
        for (const Tensor& tensor : host.tensors()) visit(item, &tensor);
        if (begin == OnHost::Begin::WithoutContents) host.upload();
        if (item.read) visit(item, nullptr);
    }
}

void append(std::span<const KeptItem> items, Recovery::Kind kind, const Device* but, std::string& copy) {
    for_each_piece(items, kind, OnHost::Begin::WithContents, but,
                   [&](const KeptItem& item, const Tensor* tensor) {
                       if (tensor != nullptr) copy += memory_of(*tensor);
                       else append_text(copy, item.read());
                   });
}

void fill(std::span<const KeptItem> items, Recovery::Kind kind, const Device* but, CopyReader& reader) {
    for_each_piece(items, kind, OnHost::Begin::WithoutContents, but,
                   [&](const KeptItem& item, const Tensor* tensor) {
                       if (tensor == nullptr) return item.write(reader.take_text());
                       const std::string_view bytes = reader.take(tensor->memory.bytes());
                       if (!bytes.empty()) std::memcpy(tensor->memory.data, bytes.data(), bytes.size());
                   });
}

std::uint64_t hash_of_piece(const KeptItem& item, const Tensor* tensor) {
    return tensor != nullptr ? hash_of(memory_of(*tensor), 0) : hash_of(item.read(), 0);
}

}  // namespace

void KeptState::add(KeptItem item) {
    const auto refuse = [&](const std::string& why) {
        throw InvalidInput(fmt::format("recovery: keep(\"{}\"): {}", ddprun::excerpt(item.name), why));
    };
    if (item.name.empty()) refuse("the state needs a name");
    if (std::ranges::any_of(items_, [&](const KeptItem& other) { return other.name == item.name; }))
        refuse("another state has this name");
    items_.push_back(std::move(item));
}

std::string KeptState::names(Kind kind) const {
    std::vector<std::string> names;
    for (const KeptItem& item : items_) {
        if (item.kind == kind) names.push_back('\'' + item.name + '\'');
    }
    return ddprun::join(names, ", ");
}

std::string KeptState::layout() const {
    std::string lines;
    for (const KeptItem& item : items_) {
        const auto kind = static_cast<int>(item.kind);
        if (item.read) lines += fmt::format("'{}' ({})\n", item.name, kind);
        for (const Tensor& tensor : item.tensors)
            lines += fmt::format("'{}' ({}), {}{}{}\n", item.name, kind, tensor.name,
                                 tensor.name.empty() ? "" : " ", describe(tensor));
    }
    return lines;
}

void KeptState::copy(Kind kind, std::string& copy) const {
    copy.clear();
    append(items_, kind, nullptr, copy);
}

void KeptState::restore(Kind kind, std::string_view copy) const {
    CopyReader reader(copy);
    fill(items_, kind, nullptr, reader);
    for (const KeptItem& item : items_) {
        if (item.kind == kind && item.object != nullptr) item.object->state_loaded();
    }
}

void KeptState::note(Kind kind) {
    auto& noted = noted_[static_cast<std::size_t>(kind)];
    noted.clear();
    for_each_piece(
        items_, kind, OnHost::Begin::WithContents, nullptr,
        [&](const KeptItem& item, const Tensor* tensor) { noted.push_back(hash_of_piece(item, tensor)); });
}

std::string KeptState::changed(Kind kind) const {
    const auto& noted = noted_[static_cast<std::size_t>(kind)];
    std::string first;
    if (noted.empty()) return first;
    for_each_piece(items_, kind, OnHost::Begin::WithContents, nullptr,
                   [&, at = noted.begin()](const KeptItem& item, const Tensor* tensor) mutable {
                       if (hash_of_piece(item, tensor) == *at++ || !first.empty()) return;
                       const bool has_name = tensor != nullptr && !tensor->name.empty();
                       first = fmt::format("'{}'{}{}", item.name, has_name ? ", " : "",
                                           has_name ? tensor->name : "");
                   });
    return first;
}

std::string KeptState::texts(const Device& device) const {
    std::string texts;
    append(items_, Kind::Committed, &device, texts);
    append(items_, Kind::Moving, &device, texts);
    return texts;
}

void KeptState::set_texts(const Device& device, std::string_view texts) const {
    CopyReader reader(texts);
    fill(items_, Kind::Committed, &device, reader);
    fill(items_, Kind::Moving, &device, reader);
}

std::vector<Tensor> KeptState::tensors(const Device& device) const {
    std::vector<Tensor> all;
    for (const KeptItem& item : items_) {
        if (!is_of_all(item)) continue;
        for (const Tensor& tensor : item.tensors) {
            if (tensor.memory.device == device) all.push_back(tensor);
            else if (tensor.memory.device != Device{})
                throw InvalidInput(fmt::format(
                    "recovery: '{}', {} is on another device than the group; keep it on the group's device, "
                    "or in host memory",
                    item.name, tensor.name));
        }
    }
    return all;
}

void KeptState::announce_loaded() const {
    for (const KeptItem& item : items_) {
        if (is_of_all(item) && item.object != nullptr) item.object->state_loaded();
    }
}

std::byte* KeptMemory::map(int fd, std::uint64_t offset, std::size_t bytes) {
    constexpr std::uint64_t kLargestPage = 65536;
    const std::uint64_t before = offset % kLargestPage;
    const int flags = MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    void* const address = ::mmap(nullptr, bytes + before, PROT_READ | PROT_WRITE, flags, fd,
                                 static_cast<off_t>(offset - before));
    if (address == MAP_FAILED) throw Error(fmt::format("kept memory: mmap: {}", std::strerror(errno)));
    mappings_.push_back({address, bytes + before});
    return static_cast<std::byte*>(address) + before;
}

KeptMemory::KeptMemory(int fd, std::uint32_t local_rank) {
    if (fd < 0) {
        line_ = new (map(-1, 0, sizeof(KeptLine))) KeptLine{};
        slot_bytes_ = ddprun::kKeptSlotBytes;
        slots_ = map(-1, 0, ddprun::kKeptSlots * slot_bytes_);
        return;
    }
    struct stat status {};
    const bool has_header =
        ::fstat(fd, &status) == 0 && static_cast<std::uint64_t>(status.st_size) >= ddprun::kKeptLinesOffset;
    const auto refuse = [&](const char* why) {
        throw InvalidInput(fmt::format("DDPRUN_KEPT_FD={} is no kept memory: {}", fd, why));
    };
    if (!has_header) refuse("it is too short");
    const auto& header = *reinterpret_cast<const KeptHeader*>(map(fd, 0, ddprun::kKeptLinesOffset));
    if (header.magic.load(std::memory_order_acquire) != ddprun::kKeptMagic) refuse("wrong magic");
    if (header.version != ddprun::kKeptVersion)
        refuse("the launcher and the worker are of different releases");
    const std::uint64_t slots = kept_slot_offset(header, local_rank, 0);
    if (local_rank >= header.workers ||
        slots + ddprun::kKeptSlots * header.slot_bytes > static_cast<std::uint64_t>(status.st_size))
        refuse("its header contradicts its size");
    limit_ = std::chrono::nanoseconds(header.wait_ns);
    line_ = reinterpret_cast<KeptLine*>(
        map(fd, ddprun::kKeptLinesOffset + sizeof(KeptLine) * local_rank, sizeof(KeptLine)));
    slot_bytes_ = header.slot_bytes;
    if (slot_bytes_ > 0) slots_ = map(fd, slots, ddprun::kKeptSlots * slot_bytes_);
}

KeptMemory::~KeptMemory() {
    for (const Mapping& one : mappings_) ::munmap(one.address, one.bytes);
}

void KeptMemory::reset() {
    line_->commits.store(0);
    line_->generation.store(0);
    for (auto& slot_of : line_->slot_of) slot_of.store(0);
}

void KeptMemory::store(std::uint64_t commits, std::string_view copy) {
    if (copy.size() > slot_bytes_)
        throw Error(fmt::format(
            "recovery: the Own values have {}, and the kept memory takes {} of each rank; keep less as Own",
            ddprun::format_bytes(copy.size()), ddprun::format_bytes(slot_bytes_)));
    const std::size_t index = commits % ddprun::kKeptSlots;
    // The process may be killed between any two of these lines.
    line_->slot_of[index].store(0, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::memcpy(slot(commits), copy.data(), copy.size());
    line_->slot_bytes[index].store(copy.size(), std::memory_order_relaxed);
    line_->slot_of[index].store(commits + 1, std::memory_order_release);
}

bool KeptMemory::is_empty() const {
    return std::ranges::all_of(line_->slot_of, [](const auto& slot_of) { return slot_of.load() == 0; });
}

bool KeptMemory::has_copy(std::uint64_t commits) const {
    return line_->slot_of[commits % ddprun::kKeptSlots].load(std::memory_order_acquire) == commits + 1;
}

std::string_view KeptMemory::copy_for(std::uint64_t commits) const {
    const std::uint64_t bytes = line_->slot_bytes[commits % ddprun::kKeptSlots].load();
    return {reinterpret_cast<const char*>(slot(commits)), bytes};
}

}  // namespace ddp
