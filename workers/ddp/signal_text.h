#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp {

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
