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

/// Names are demangled. Omits its own frame and the `skip` innermost ones.
std::string stack_trace(int skip = 0);

/// A stack trace with mangled names, async-signal-safe after prepare_stack_trace(). Writes at most `size`
/// bytes and returns their number.
std::size_t raw_stack_trace(char* text, std::size_t size);

/// Loads the unwinder's libraries; otherwise the first trace would allocate memory.
void prepare_stack_trace();

/// Lets the launcher request stacks of this process: a thread that gets SIGRTMIN+5 sends its stack through
/// the lifeline (the inherited descriptor), and continues. The rank's line in the segment announces the
/// signal. Lasts until the process ends; another call goes over to the segment of another generation. Without
/// effect where the program handles that signal itself.
void answer_stack_requests(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, int lifeline_fd);

/// While it lives, for `limit` at most, the launcher (`--hang-timeout`) takes no rank for hung: the others
/// have reason to wait for this one. Without effect when the launcher requests no stacks. One at a time.
class HangDetectionPause {
  public:
    explicit HangDetectionPause(std::chrono::nanoseconds limit);
    ~HangDetectionPause();
    HangDetectionPause(const HangDetectionPause&) = delete;
    HangDetectionPause& operator=(const HangDetectionPause&) = delete;
};

/// Builds text in a signal handler, in a given buffer; the end is cut off when the buffer is full.
class SignalText {
  public:
    SignalText(char* memory, std::size_t capacity) : memory_(memory), capacity_(capacity) {}

    SignalText& add(const char* text) {
        while (*text != '\0') put(*text++);
        return *this;
    }
    SignalText& add_number(std::uint64_t value) { return add_digits(value, 10); }
    SignalText& add_hex(std::uint64_t value) { return add_digits(value, 16); }
    /// Adds text escaped for a JSON string.
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
