#include "env/io/curve_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr std::size_t kSecondDigits = 10;
constexpr std::uint64_t kSecondsEnd = 10'000'000'000;  ///< the first number with more digits
constexpr double kLongestWait = 1;                     ///< seconds
constexpr std::size_t kMostWaiting = 64 * 1024;        ///< bytes

/// Row k is for a byte that k more bytes follow ("slicing by 8").
using CrcTable = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTable make_crc_table() {
    constexpr std::uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, reflected
    CrcTable table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
        table[0][byte] = crc;
    }
    for (std::size_t row = 1; row < table.size(); ++row) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t crc = table[row - 1][byte];
            table[row][byte] = (crc >> 8) ^ table[0][crc & 0xff];
        }
    }
    return table;
}
constexpr CrcTable kCrcTable = make_crc_table();

template <class Number>
std::array<char, sizeof(Number)> little_endian(Number number) {
    std::array<char, sizeof(Number)> bytes{};
    for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<char>(static_cast<unsigned char>(number >> (8 * i)));
    return bytes;
}

std::uint64_t first_word(std::string_view bytes) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < sizeof word; ++i)
        word |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    return word;
}

std::uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8U; }

template <class Number>
void put_fixed(std::string& out, Number number) {
    const auto bytes = little_endian(number);
    out.append(bytes.data(), bytes.size());
}

void put_varint(std::string& out, std::uint64_t number) {
    for (; number >= 0x80; number >>= 7) out += static_cast<char>(static_cast<unsigned char>(number | 0x80));
    out += static_cast<char>(number);
}

enum class Wire : std::uint8_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };

void put_key(std::string& out, unsigned field, Wire wire) {
    put_varint(out, field << 3 | static_cast<unsigned>(wire));
}

std::size_t varint_size(std::uint64_t number) {
    return static_cast<std::size_t>(std::bit_width(number | 1) + 6) / 7;
}

void put_bytes(std::string& out, unsigned field, std::string_view bytes) {
    put_key(out, field, Wire::Bytes);
    put_varint(out, bytes.size());
    out += bytes;
}

/// A record: length and data, each with its sum. `put_what` adds what the event has besides time and step.
template <class PutWhat>
void append_record(std::string& out, double wall_time, std::uint64_t step, const PutWhat& put_what) {
    const std::size_t begin = out.size();
    constexpr std::size_t kHeader = sizeof(std::uint64_t) + sizeof(std::uint32_t);
    out.append(kHeader, '\0');
    put_key(out, 1, Wire::Fixed64);
    put_fixed(out, std::bit_cast<std::uint64_t>(wall_time));
    if (step > 0) {  // protobuf leaves out a zero
        put_key(out, 2, Wire::Varint);
        put_varint(out, step);
    }
    put_what();
    const std::string_view event = std::string_view(out).substr(begin + kHeader);
    const std::uint32_t sum = masked_crc(event);
    const auto length = little_endian(std::uint64_t{event.size()});
    const auto sum_of_length = little_endian(masked_crc({length.data(), length.size()}));
    std::copy(sum_of_length.begin(), sum_of_length.end(),
              std::copy(length.begin(), length.end(), out.begin() + static_cast<std::ptrdiff_t>(begin)));
    put_fixed(out, sum);
}

/// Bytes of a Summary.Value.
std::size_t size_of(const Scalar& scalar) {
    return 1 + varint_size(scalar.name.size()) + scalar.name.size() + 1 + sizeof(float);
}

std::optional<std::uint64_t> second_in(std::string_view name) {
    if (!name.starts_with(kPrefix)) return std::nullopt;
    name.remove_prefix(kPrefix.size());
    if (name.size() <= kSecondDigits || name[kSecondDigits] != '.') return std::nullopt;
    const Result<std::uint64_t> second = parse_uint(name.substr(0, kSecondDigits));
    return second ? std::optional(*second) : std::nullopt;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
    std::uint32_t crc = ~0U;
    for (; bytes.size() >= sizeof(std::uint64_t); bytes.remove_prefix(sizeof(std::uint64_t))) {
        const std::uint64_t word = first_word(bytes) ^ crc;
        crc = 0;
        for (std::size_t i = 0; i < sizeof word; ++i) crc ^= kCrcTable[7 - i][word >> (8 * i) & 0xff];
    }
    for (const char byte : bytes)
        crc = (crc >> 8) ^ kCrcTable[0][(crc ^ static_cast<unsigned char>(byte)) & 0xff];
    return ~crc;
}

void append_version(std::string& out, double wall_time) {
    append_record(out, wall_time, 0, [&] { put_bytes(out, 3, "brain.Event:2"); });
}

void append_start(std::string& out, double wall_time, std::uint64_t step) {
    constexpr std::string_view kStatusStart = "\x08\x01";  // SessionLog: its field 1 is START
    append_record(out, wall_time, step, [&] { put_bytes(out, 7, kStatusStart); });
}

void append_scalars(std::string& out, double wall_time, std::uint64_t step, std::span<const Scalar> scalars) {
    std::size_t summary = 0;
    for (const Scalar& scalar : scalars) summary += 1 + varint_size(size_of(scalar)) + size_of(scalar);
    append_record(out, wall_time, step, [&] {
        put_key(out, 5, Wire::Bytes);
        put_varint(out, summary);
        for (const Scalar& scalar : scalars) {
            put_key(out, 1, Wire::Bytes);
            put_varint(out, size_of(scalar));
            put_bytes(out, 1, scalar.name);
            put_key(out, 2, Wire::Fixed32);
            put_fixed(out, std::bit_cast<std::uint32_t>(static_cast<float>(scalar.value)));
        }
    });
}

CurveFileTimes curve_file_times(const std::vector<std::string>& names, std::uint64_t now) {
    CurveFileTimes times{now, now};
    for (const std::string& name : names) {
        const std::optional<std::uint64_t> second = second_in(name);
        if (!second) continue;
        times.first = std::min(times.first, *second);
        times.own = std::max(times.own, std::min(*second + 1, kSecondsEnd - 1));
    }
    return times;
}

Result<std::unique_ptr<CurveFile>> CurveFile::create(const std::string& directory) {
    if (const Status made = make_directories(directory); !made) return made.error();
    const CurveFileTimes times =
        curve_file_times(names_in(directory), static_cast<std::uint64_t>(::time(nullptr)));
    // Names of one second differ by host and process, or by `own` within a process.
    std::string path = fmt::format("{}/{}{:0{}}.{}.{}", directory, kPrefix, times.own, kSecondDigits,
                                   host_name(), ::getpid());
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC | O_NOCTTY, 0644));
    if (!fd) return Error::system("open " + path);
    return std::unique_ptr<CurveFile>(new CurveFile(std::move(path), std::move(fd), times.first));
}

CurveFile::~CurveFile() { (void)flush(); }

void CurveFile::begin(double wall_time, std::uint64_t step) {
    if (!has_version_) append_version(waiting_, wall_time);
    if (!has_begun_) append_start(waiting_, wall_time, step);
    has_version_ = has_begun_ = true;
}

Status CurveFile::add(double wall_time, std::uint64_t step, std::span<const Scalar> scalars) {
    if (waiting_.empty()) waiting_since_ = wall_time;
    begin(wall_time, step);
    append_scalars(waiting_, wall_time, step, scalars);
    const bool is_new = wall_time >= waiting_since_ && wall_time < waiting_since_ + kLongestWait;
    return is_new && waiting_.size() < kMostWaiting ? Status{} : flush();
}

Status CurveFile::flush() {
    if (waiting_.empty()) return {};
    ssize_t written = 0;
    do written = ::write(fd_.get(), waiting_.data(), waiting_.size());
    while (written < 0 && errno == EINTR);
    const std::size_t wanted = waiting_.size();
    const Error error = Error::system("write " + path_);
    waiting_.clear();
    if (written == static_cast<ssize_t>(wanted)) {
        written_ += wanted;
        return {};
    }
    // The next points follow a gap: they are a beginning again.
    has_begun_ = false;
    if (written_ == 0) has_version_ = false;
    if (written <= 0) return error;
    // A reader stops at a record that is not whole.
    if (::ftruncate(fd_.get(), static_cast<off_t>(written_)) != 0) fd_.reset();
    return Error{Errc::System, fmt::format("write {}: only {} of {} bytes", path_, written, wanted), ENOSPC};
}

}  // namespace ddprun
