#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "env/result.h"

namespace ddprun {

using Digest = std::array<std::uint8_t, 32>;

/// HMAC-SHA256 (RFC 2104, FIPS 180-4) by libcrypto. Any key length.
Digest hmac_sha256(std::string_view key, std::string_view message);
/// SHA-256 (FIPS 180-4) of the pieces one after another, by libcrypto.
Digest sha256(std::span<const std::string_view> pieces);
/// Compares in a time that does not depend on where the digests differ.
bool equal_digest(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

/// Encrypts and authenticates `plain` under `key`: a nonce, as many bytes as `plain` has, a MAC. The key
/// stream is HMAC-SHA256 in counter mode (NIST SP 800-108), the MAC an HMAC over nonce and cipher text; each
/// has its own key, derived from `key`, which must be random. rendezvous/PROTOCOL.md has the bytes. Error:
/// System (getrandom).
Result<std::string> seal(std::string_view key, std::string_view plain);
/// Decrypts `sealed`. Error: Refused when it was sealed under another key, or changed since.
Result<std::string> unseal(std::string_view key, std::string_view sealed);

/// `bytes` random bytes from the kernel as lower-case hexadecimal. Error: System (getrandom).
Result<std::string> random_hex(std::size_t bytes);
std::string to_hex(std::span<const std::uint8_t> bytes);
/// Error: InvalidArgument on an odd length or another character.
Result<std::string> from_hex(std::string_view hex);

}  // namespace ddprun
