#include "env/hmac.h"

// OpenSSL 3.0 deprecates the plain SHA256_ calls in favour of EVP, which is avoided below.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace ddprun {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

/// A SHA-256 in progress, by libcrypto's own implementation of it (with the processor's SHA instructions).
///
/// It avoids EVP and HMAC(): their first use in a process loads providers and the configuration file, which
/// costs every ddprun and every worker a millisecond and makes behaviour depend on the user's OPENSSL_CONF.
class Sha256 {
  public:
    Sha256() { must(::SHA256_Init(&state_)); }
    Sha256& add(std::span<const std::uint8_t> bytes) {
        must(::SHA256_Update(&state_, bytes.data(), bytes.size()));
        return *this;
    }
    Digest finish() {
        Digest digest{};
        must(::SHA256_Final(digest.data(), &state_));
        return digest;
    }

  private:
    /// Aborts on a failure: a digest of zeros could equal the other side's.
    static void must(int done) {
        if (done == 1) return;
        std::fputs("ddprun: libcrypto cannot compute SHA-256\n", stderr);
        std::abort();
    }
    ::SHA256_CTX state_{};
};

std::span<const std::uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

constexpr std::size_t kSealNonceBytes = 16;
constexpr std::string_view kSealCipherLabel = "ddprun seal 1 cipher", kSealMacLabel = "ddprun seal 1 mac";

std::string_view text_of(const Digest& digest) {
    return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

/// Encrypts and decrypts: `text` XOR the key stream of `nonce`.
std::string with_key_stream(std::string_view key, std::string_view nonce, std::string_view text) {
    std::string result(text);
    Digest block{};
    for (std::size_t i = 0; i < result.size(); ++i) {
        const std::size_t within = i % block.size();
        if (within == 0) {
            std::string counter(8, '\0');
            for (std::size_t byte = 0, number = i / block.size(); byte < 8; ++byte) {
                counter[7 - byte] = static_cast<char>(number >> (8 * byte) & 0xff);
            }
            block = hmac_sha256(key, std::string(nonce) + counter);
        }
        result[i] = static_cast<char>(result[i] ^ static_cast<char>(block[within]));
    }
    return result;
}

int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

}  // namespace

// RFC 2104: H(key ^ opad, H(key ^ ipad, message)), the key filled up with zeros to a block, hashed if longer.
Digest hmac_sha256(std::string_view key, std::string_view message) {
    std::array<std::uint8_t, SHA256_CBLOCK> inner{}, outer{};
    const Digest hashed_key = Sha256().add(bytes_of(key)).finish();
    const std::span<const std::uint8_t> used =
        key.size() > inner.size() ? std::span(hashed_key) : bytes_of(key);
    std::copy(used.begin(), used.end(), inner.begin());
    outer = inner;
    for (std::uint8_t& byte : inner) byte ^= 0x36;
    for (std::uint8_t& byte : outer) byte ^= 0x5c;
    const Digest within = Sha256().add(inner).add(bytes_of(message)).finish();
    return Sha256().add(outer).add(within).finish();
}

Digest sha256(std::span<const std::string_view> pieces) {
    Sha256 hash;
    for (const std::string_view piece : pieces) hash.add(bytes_of(piece));
    return hash.finish();
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

Result<std::string> seal(std::string_view key, std::string_view plain) {
    const Result<std::string> random = random_hex(kSealNonceBytes);
    if (!random) return random.error();
    const std::string nonce = *from_hex(*random);
    const Digest cipher_key = hmac_sha256(key, kSealCipherLabel), mac_key = hmac_sha256(key, kSealMacLabel);
    std::string sealed = nonce + with_key_stream(text_of(cipher_key), nonce, plain);
    const Digest mac = hmac_sha256(text_of(mac_key), sealed);
    return sealed.append(text_of(mac));
}

Result<std::string> unseal(std::string_view key, std::string_view sealed) {
    const Error refused{Errc::Refused, "it was sealed under another key, or changed on its way", 0};
    if (sealed.size() < kSealNonceBytes + sizeof(Digest)) return refused;
    const std::string_view covered = sealed.substr(0, sealed.size() - sizeof(Digest));
    const Digest cipher_key = hmac_sha256(key, kSealCipherLabel), mac_key = hmac_sha256(key, kSealMacLabel);
    if (!equal_digest(hmac_sha256(text_of(mac_key), covered), bytes_of(sealed.substr(covered.size()))))
        return refused;
    return with_key_stream(text_of(cipher_key), covered.substr(0, kSealNonceBytes),
                           covered.substr(kSealNonceBytes));
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
    // The message does not show the text, which may be a secret.
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
