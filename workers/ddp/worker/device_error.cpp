#include "ddp/worker/device_error.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

namespace ddp {
namespace {

/// Two buffers in turn: a signal handler reads one while the other is written.
struct ErrorText {
    std::array<std::array<char, 1001>, 2> places{};
    std::atomic<unsigned> newest{0};
    std::mutex writing;
};

ErrorText& text_of(DeviceLibrary library) noexcept {
    static std::array<ErrorText, 2> texts;
    return texts[library == DeviceLibrary::Nccl ? 0 : 1];
}

}  // namespace

void note_device_error(DeviceLibrary library, std::string_view text) noexcept {
    ErrorText& stored = text_of(library);
    const std::lock_guard lock(stored.writing);
    const unsigned next = 1 - stored.newest.load(std::memory_order_relaxed);
    std::array<char, 1001>& place = stored.places[next];
    const std::size_t length = std::min(text.size(), place.size() - 1);
    std::memcpy(place.data(), text.data(), length);
    place[length] = '\0';
    stored.newest.store(next, std::memory_order_release);
}

const char* last_device_error(DeviceLibrary library) noexcept {
    const ErrorText& stored = text_of(library);
    return stored.places[stored.newest.load(std::memory_order_acquire)].data();
}

const char* report_key(DeviceLibrary library) noexcept {
    return library == DeviceLibrary::Nccl ? "nccl_error" : "cuda_error";
}

}  // namespace ddp
