#include <gtest/gtest.h>

#include "env/hmac.h"

namespace ddprun {
namespace {

std::string repeated(char byte, std::size_t count) { return std::string(count, byte); }

std::string hmac_hex(const std::string& key, const std::string& message) {
    return to_hex(hmac_sha256(key, message));
}

// RFC 4231, section 4; case 5 tests truncation, which we do not use.
TEST(Hmac, GivesTheResultsOfRfc4231) {
    EXPECT_EQ(hmac_hex(repeated('\x0b', 20), "Hi There"),
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    EXPECT_EQ(hmac_hex("Jefe", "what do ya want for nothing?"),
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    EXPECT_EQ(hmac_hex(repeated('\xaa', 20), repeated('\xdd', 50)),
              "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    EXPECT_EQ(hmac_hex(*from_hex("0102030405060708090a0b0c0d0e0f10111213141516171819"), repeated('\xcd', 50)),
              "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    EXPECT_EQ(hmac_hex(repeated('\xaa', 131), "Test Using Larger Than Block-Size Key - Hash Key First"),
              "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    EXPECT_EQ(
        hmac_hex(
            repeated('\xaa', 131),
            "This is a test using a larger than block-size key and a larger than block-size data. The key "
            "needs to be hashed before being used by the HMAC algorithm."),
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Hmac, AnEmptyKeyIsAKey) {
    const Digest with_key = hmac_sha256("key", "message");
    const Digest without = hmac_sha256("", "message");
    EXPECT_NE(with_key, without);
    EXPECT_EQ(without, hmac_sha256(std::string_view(), "message"));
    EXPECT_EQ(to_hex(hmac_sha256("", "")),
              "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(Sha256, OfPiecesIsThatOfTheWholeOfFips180) {
    constexpr const char* kOfAbc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const auto hex = [](std::initializer_list<std::string_view> pieces) {
        return to_hex(sha256(std::span(pieces)));
    };
    EXPECT_EQ(hex({"abc"}), kOfAbc);
    EXPECT_EQ(hex({"a", "", "bc"}), kOfAbc);
    EXPECT_EQ(hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(EqualDigest, SeesAnyOneBitAndAnyLength) {
    const Digest digest = hmac_sha256("key", "message");
    EXPECT_TRUE(equal_digest(digest, digest));
    for (std::size_t byte = 0; byte < digest.size(); ++byte) {
        Digest other = digest;
        other[byte] = static_cast<std::uint8_t>(other[byte] ^ 1U);
        EXPECT_FALSE(equal_digest(digest, other)) << byte;
    }
    EXPECT_FALSE(equal_digest(digest, std::span(digest).first(31)));
    EXPECT_FALSE(equal_digest({}, digest));
}

TEST(RandomHex, HasTheLengthAskedForAndNeverRepeats) {
    const Result<std::string> one = random_hex(32);
    const Result<std::string> other = random_hex(32);
    ASSERT_TRUE(one && other);
    EXPECT_EQ(one->size(), 64U);
    EXPECT_NE(*one, *other);
    EXPECT_EQ(from_hex(*one)->size(), 32U);
    EXPECT_EQ(*random_hex(0), "");
}

TEST(FromHex, ReadsBothCasesAndRefusesTheRest) {
    EXPECT_EQ(*from_hex("00fFaB"), std::string("\x00\xff\xab", 3));
    EXPECT_EQ(*from_hex(""), "");
    for (const char* const bad : {"0", "0g", "0x", " 0", "abc"}) {
        const Result<std::string> bytes = from_hex(bad);
        ASSERT_FALSE(bytes) << bad;
        EXPECT_EQ(bytes.error().code, Errc::InvalidArgument);
    }
}

TEST(Seal, IsOpenedByItsKeyOnlyAndShowsNothingOfThePlainText) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{32},
                                    std::size_t{33}, std::size_t{5000}}) {
        const std::string plain = repeated('a', bytes);
        const Result<std::string> one = seal("key", plain), other = seal("key", plain);
        ASSERT_TRUE(one && other);
        EXPECT_EQ(one->size(), 16 + bytes + 32);
        EXPECT_NE(*one, *other) << "each has a nonce of its own";
        EXPECT_EQ(one->find("aaaa"), std::string::npos);
        EXPECT_EQ(*unseal("key", *one), plain);
        EXPECT_EQ(unseal("another key", *one).error().code, Errc::Refused);
    }
}

TEST(Seal, IsRefusedWhenAnyBitChangesOrAnyByteIsMissing) {
    const std::string sealed = *seal("key", "what the head orders");
    for (std::size_t i = 0; i < sealed.size(); ++i) {
        std::string changed = sealed;
        changed[i] = static_cast<char>(changed[i] ^ (1 << i % 8));
        EXPECT_EQ(unseal("key", changed).error().code, Errc::Refused) << i;
        EXPECT_EQ(unseal("key", sealed.substr(0, i)).error().code, Errc::Refused) << i;
    }
    EXPECT_FALSE(unseal("key", sealed + '\0'));
}

// Computed from PROTOCOL.md's words by Python's hmac module.
TEST(Seal, IsWhatTheProtocolDocumentSays) {
    const std::string sealed = *from_hex(
        "000102030405060708090a0b0c0d0e0f1f9612c9c94d68a1d29de35149e205e22e160f6a5c7d11d03caaf807"
        "e6b1b2791b18a019b18c08a24b71efe718ae923d9baf97a848a689039fd0d195e4c5f5d6ba4b2612300fc3e8");
    EXPECT_EQ(*unseal("0123456789abcdef", sealed), "forty bytes, so two blocks of key stream");
}

}  // namespace
}  // namespace ddprun
