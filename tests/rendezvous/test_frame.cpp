#include <gtest/gtest.h>

#include "rendezvous/wire/frame.h"

namespace ddprun::rdzv {
namespace {

const Frame kFrame{17, 0x01020304, R"({"key":"a"})", std::string("\0\xff blob", 7)};

FrameDecoder decoder() { return FrameDecoder(kPeerLimits); }

TEST(Frame, HeaderIsTheDocumentedTwentyBytes) {
    std::string bytes;
    append_header(bytes, 17, 0x01020304, 11, 0x00050607);
    EXPECT_EQ(bytes, std::string("DDPR\x01\x11\0\0\x01\x02\x03\x04\0\0\0\x0b\0\x05\x06\x07", 20));
}

TEST(FrameDecoder, DecodesTheSameFrameFromAnyPieces) {
    const std::string bytes = encode(kFrame) + encode(kFrame);
    for (std::size_t piece = 1; piece <= bytes.size(); ++piece) {
        FrameDecoder cut = decoder();
        int frames = 0;
        for (std::size_t at = 0; at < bytes.size(); at += piece) {
            cut.feed(std::string_view(bytes).substr(at, piece));
            for (auto frame = cut.next(); *frame; frame = cut.next(), ++frames) EXPECT_EQ(**frame, kFrame);
        }
        EXPECT_EQ(frames, 2) << "in pieces of " << piece;
        EXPECT_EQ(cut.pending(), 0U);
    }
}

TEST(FrameDecoder, DetectsAStreamThatEndsWithinAFrame) {
    FrameDecoder cut = decoder();
    cut.feed(encode(kFrame).substr(0, 25));
    EXPECT_FALSE(*cut.next());
    EXPECT_EQ(cut.pending(), 25U);
}

TEST(FrameDecoder, DetectsAnotherProtocolByTheFirstByte) {
    FrameDecoder foreign = decoder();
    foreign.feed("G");
    const auto frame = foreign.next();
    ASSERT_FALSE(frame);
    EXPECT_EQ(frame.error().code, Errc::Protocol);
    EXPECT_NE(frame.error().what.find("0x47"), std::string::npos) << frame.error().what;
    EXPECT_TRUE(foreign.is_foreign());
}

TEST(FrameDecoder, RefusesAWrongMagicBeforeTheHeaderIsComplete) {
    FrameDecoder wrong = decoder();
    wrong.feed("DDX");
    EXPECT_EQ(wrong.next().error().code, Errc::Protocol);
    EXPECT_FALSE(wrong.is_foreign());
}

TEST(FrameDecoder, RefusesAnotherMajorVersionNamingBoth) {
    std::string bytes = encode(kFrame);
    bytes[4] = 9;
    FrameDecoder other = decoder();
    other.feed(bytes);
    const auto frame = other.next();
    ASSERT_FALSE(frame);
    EXPECT_NE(frame.error().what.find("version 9"), std::string::npos);
    EXPECT_NE(frame.error().what.find("this is version 1"), std::string::npos);
}

TEST(FrameDecoder, RefusesReservedBytesThatAreNotZero) {
    std::string bytes = encode(kFrame);
    bytes[7] = 1;
    FrameDecoder reserved = decoder();
    reserved.feed(bytes);
    EXPECT_EQ(reserved.next().error().code, Errc::Protocol);
}

TEST(FrameDecoder, RefusesALengthBeyondTheLimitBeforeTheBytesArrive) {
    for (const bool in_json : {true, false}) {
        std::string header;
        append_header(header, 1, 1, in_json ? kPeerLimits.json_bytes + 1 : 0,
                      in_json ? 0 : kPeerLimits.blob_bytes + 1);
        FrameDecoder greedy = decoder();
        greedy.feed(header);
        const auto frame = greedy.next();
        ASSERT_FALSE(frame);
        EXPECT_EQ(frame.error().code, Errc::Limit);
    }
}

TEST(FrameDecoder, HasASmallLimitBeforeTheHandshake) {
    std::string header;
    append_header(header, 1, 1, kStrangerLimits.json_bytes + 1, 0);
    FrameDecoder stranger(kStrangerLimits);
    stranger.feed(header);
    EXPECT_EQ(stranger.next().error().code, Errc::Limit);
}

TEST(FrameDecoder, StaysBrokenAfterAnError) {
    FrameDecoder broken = decoder();
    broken.feed("XXXX");
    const Error first = broken.next().error();
    broken.feed(encode(kFrame));
    EXPECT_EQ(broken.next().error(), first);
}

}  // namespace
}  // namespace ddprun::rdzv
