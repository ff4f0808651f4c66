#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ddp/worker/segment_map.h"

/// Stacks of the calling thread, as text with one frame per line:
///
///     #3 train::Trainer::run(std::string const&) [/opt/train+0x41f2]
///
/// Functions that are not exported have no name (link with -rdynamic to export them); addr2line takes the
/// offset.
namespace ddp {

/// With readable C++ names. Leaves out the `skip` innermost frames, besides its own.
std::string stack_trace(int skip = 0);

/// The same with mangled names, async-signal-safe once prepare_stack_trace() has been called. Writes at most
/// `size` bytes and returns how many.
std::size_t raw_stack_trace(char* text, std::size_t size);

/// Loads what the unwinder needs; the first trace would otherwise allocate memory.
void prepare_stack_trace();

/// From now on the launcher can ask this process for its stacks: a thread that gets SIGRTMIN+5 sends its
/// stack through the lifeline (the inherited descriptor), and goes on. The rank's line in the segment says
/// so. Kept for the life of the process; a second call does nothing, nor does one where the program handles
/// that signal itself.
void answer_stack_requests(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd);

/// For as long as it lives the other ranks wait for this one with good reason, for `limit` at the longest:
/// the launcher
/// (`--hang-timeout`) takes nobody for hung meanwhile. Nothing without a launcher that asks for stacks. One
/// at a time.
class Awaited {
  public:
    explicit Awaited(std::chrono::nanoseconds limit);
    ~Awaited();
    Awaited(const Awaited&) = delete;
    Awaited& operator=(const Awaited&) = delete;
};

/// Text put together in a signal handler: into memory that is there already, cut where that ends.
class SignalText {
  public:
    SignalText(char* memory, std::size_t capacity) : memory_(memory), capacity_(capacity) {}

    SignalText& add(const char* text) {
        while (*text != '\0') put(*text++);
        return *this;
    }
    SignalText& add_number(std::uint64_t value) { return add_digits(value, 10); }
    SignalText& add_hex(std::uint64_t value) { return add_digits(value, 16); }
    /// As the inside of a JSON string.
    SignalText& add_json(const char* text, std::size_t length) {
        for (std::size_t i = 0; i < length; ++i) {
            const char c = text[i];
            if (c == '\n') add("\\n");
            else if (c == '"' || c == '\\') put('\\'), put(c);
            else put(static_cast<unsigned char>(c) < 0x20 ? ' ' : c);
        }
        return *this;
    }

    [[nodiscard]] const char* data() const { return memory_; }
    [[nodiscard]] std::size_t size() const { return size_; }

  private:
    void put(char c) {
        if (size_ < capacity_) memory_[size_++] = c;
    }
    SignalText& add_digits(std::uint64_t value, unsigned base) {
        char digits[20];
        int count = 0;
        do digits[count++] = "0123456789abcdef"[value % base];
        while ((value /= base) != 0);
        while (count > 0) put(digits[--count]);
        return *this;
    }

    char* memory_;
    std::size_t capacity_;
    std::size_t size_ = 0;
};

}  // namespace ddp
