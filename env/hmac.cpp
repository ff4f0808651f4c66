#include "env/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cstdio>
#include <cstdlib>

namespace ddprun {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

/// Without it, libcrypto reads openssl.cnf on first use: file accesses in every worker, and behaviour that
/// depends on the user's OPENSSL_CONF.
void start_libcrypto_without_configuration() {
    static const int started =
        ::OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
    static_cast<void>(started);
}

int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

}  // namespace

Digest hmac_sha256(std::string_view key, std::string_view message) {
    start_libcrypto_without_configuration();
    Digest digest{};
    unsigned int length = 0;
    // libcrypto takes a null key as "the key of the call before", so an empty one needs an address.
    const void* const key_bytes = key.empty() ? "" : key.data();
    const auto* const bytes = reinterpret_cast<const unsigned char*>(message.data());
    const unsigned char* const done = ::HMAC(::EVP_sha256(), key_bytes, static_cast<int>(key.size()), bytes,
                                             message.size(), digest.data(), &length);
    if (done == nullptr || length != digest.size()) {
        // Never go on with a digest of zeros: the other side might hold the same one.
        std::fputs("ddprun: libcrypto cannot compute HMAC-SHA256\n", stderr);
        std::abort();
    }
    return digest;
}

bool equal_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) {
    return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Result<std::string> random_hex(std::size_t bytes) {
    std::string random(bytes, '\0');
    for (std::size_t have = 0; have < bytes;) {
        const ssize_t got = ::getrandom(random.data() + have, bytes - have, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return Error::system("getrandom");
        have += static_cast<std::size_t>(got);
    }
    return to_hex({reinterpret_cast<const std::uint8_t*>(random.data()), random.size()});
}

std::string to_hex(std::span<const std::uint8_t> bytes) {
    std::string hex;
    hex.reserve(bytes.size() * 2);
    for (const std::uint8_t byte : bytes) {
        hex += kHexDigits[byte >> 4];
        hex += kHexDigits[byte & 15];
    }
    return hex;
}

Result<std::string> from_hex(std::string_view hex) {
    // The text may be a secret: the message does not show it.
    if (hex.size() % 2 != 0) return Error{Errc::InvalidArgument, "hexadecimal text of odd length", 0};
    std::string bytes;
    bytes.reserve(hex.size() / 2);
    for (std::size_t i = 0; i < hex.size(); i += 2) {
        const int high = hex_value(hex[i]);
        const int low = hex_value(hex[i + 1]);
        if (high < 0 || low < 0) return Error{Errc::InvalidArgument, "a character is not hexadecimal", 0};
        bytes += static_cast<char>(high * 16 + low);
    }
    return bytes;
}

}  // namespace ddprun
