#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "ddp/checkpoint.h"
#include "tests/support/temporary_directory.h"

namespace {

using ddp::SafetensorsFile;
using ddp::Tensor;
using ddprun::test::TemporaryDirectory;

std::string read_all(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write_all(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string file_with(const std::string& header, const std::string& data) {
    const std::uint64_t size = header.size();
    return std::string(reinterpret_cast<const char*>(&size), 8) + header + data;
}

std::string refusal(const std::string& path) {
    try {
        SafetensorsFile::open(path);
    } catch (const ddp::InvalidInput& error) {
        return error.what();
    }
    return "accepted";
}

std::string message_of(const std::function<void()>& act) {
    try {
        act();
    } catch (const ddp::InvalidInput& error) {
        return error.what();
    }
    return "nothing";
}

struct Weights {
    std::vector<float> w = {1, 2, 3, 4, 5, 6};
    std::vector<double> d = {0.25};
    std::vector<std::int64_t> n = {-7, 9};
    std::vector<float> none;
    std::vector<Tensor> tensors() {
        return {ddp::tensor_of("w", std::span(w), {2, 3}), ddp::tensor_of("d", std::span(d), {}),
                ddp::tensor_of("n", std::span(n), {2}), ddp::tensor_of("none", std::span(none), {0, 5})};
    }
};

TEST(Safetensors, ReadsBackWhatItWrote) {
    const TemporaryDirectory directory;
    Weights saved;
    ddp::write_safetensors(directory.file("a"), saved.tensors(), {{"format", "pt"}});

    Weights loaded{{0, 0, 0, 0, 0, 0}, {0}, {0, 0}, {}};
    const SafetensorsFile file = SafetensorsFile::open(directory.file("a"));
    file.read_into(loaded.tensors());
    EXPECT_EQ(loaded.w, saved.w);
    EXPECT_EQ(loaded.d, saved.d);
    EXPECT_EQ(loaded.n, saved.n);
    EXPECT_EQ(file.metadata(), (ddp::Metadata{{"format", "pt"}}));
    EXPECT_EQ(file.entries().at("w").shape, (std::vector<std::int64_t>{2, 3}));
}

Tensor part_of(const char* name, std::vector<float>& values, std::vector<std::int64_t> shape,
               std::size_t begin) {
    return {name, std::move(shape), ddp::buffer_of(values), begin};
}

// The other ranks' parts would stay unchanged, and nothing would say so.
TEST(Safetensors, RefusesToReadOrWriteAPartOfATensor) {
    const TemporaryDirectory directory;
    Weights weights;
    const std::string path = directory.file("a");
    ddp::write_safetensors(path, weights.tensors());
    std::vector<float> part = {7, 7};
    std::vector<Tensor> tensors = weights.tensors();
    tensors[0] = part_of("w", part, {2, 3}, 4);
    const auto checkpoint =
        ddp::CheckpointDirectory(directory.path()).save(weights.tensors(), weights.tensors(), {});
    const std::vector<std::pair<std::string, std::function<void()>>> calls = {
        {path, [&] { (void)ddp::load_weights(path, tensors); }},
        {path, [&] { (void)SafetensorsFile::open(path).read_matching(tensors); }},
        {path, [&] { SafetensorsFile::open(path).read_into(tensors); }},
        {checkpoint, [&] { ddp::load_checkpoint(checkpoint, tensors, weights.tensors()); }},
        {checkpoint, [&] { ddp::load_checkpoint(checkpoint, weights.tensors(), tensors); }},
        {directory.file("b"), [&] { ddp::write_safetensors(directory.file("b"), tensors); }}};
    for (const auto& [file, call] : calls)
        EXPECT_EQ(
            message_of(call),
            file +
                ": only a part of tensor 'w' is here: save a sharded model with a CheckpointDirectory, and "
                "load it with that or load_weights(group, path, model), on all ranks");
    EXPECT_EQ(part, (std::vector<float>{7, 7}));
}

TEST(Tensors, ThatArePartsLieInsideTheirTensor) {
    std::vector<float> values(4), none;
    const auto is_valid = [](const Tensor& tensor) {
        return message_of([&] { ddp::check_tensors({&tensor, 1}); }) == "nothing";
    };
    EXPECT_TRUE(is_valid(part_of("w", values, {2, 3}, 0)));
    EXPECT_TRUE(is_valid(part_of("w", values, {2, 3}, 2)));
    EXPECT_TRUE(is_valid(part_of("w", none, {2, 3}, 6)));
    EXPECT_TRUE(is_valid(part_of("w", none, {0, 3}, 0)));
    EXPECT_FALSE(is_valid(part_of("w", values, {2, 3}, 3)));
    EXPECT_FALSE(is_valid(part_of("w", none, {2, 3}, 7)));
    EXPECT_FALSE(is_valid(part_of("w", values, {2, 3}, SIZE_MAX - 3))) << "the sum must not wrap";
    EXPECT_FALSE(is_valid(part_of("w", values, {2, -3}, 0)));
    EXPECT_FALSE(is_valid({"w", {2, 3}, ddp::buffer_of(values)})) << "not said to be a part";
    EXPECT_EQ(message_of([&] {
                  const Tensor tensor = part_of("w", values, {2, 3}, 3);
                  ddp::check_tensors({&tensor, 1});
              }),
              "tensor 'w': float32[2, 3] does not hold 4 elements");
}

TEST(Safetensors, HoldsTensorsWithoutElementsInAnyPosition) {
    const TemporaryDirectory directory;
    std::vector<float> none, two = {1, 2}, loaded(2);
    const auto all = [&](std::vector<float>& values) {
        return std::vector<Tensor>{ddp::tensor_of("first", std::span(none), {0}),
                                   ddp::tensor_of("second", std::span(none), {3, 0}),
                                   ddp::tensor_of("values", std::span(values), {2}),
                                   ddp::tensor_of("last", std::span(none), {0, 7, 0})};
    };
    ddp::write_safetensors(directory.file("a"), all(two));
    const SafetensorsFile file = SafetensorsFile::open(directory.file("a"));
    file.read_into(all(loaded));
    EXPECT_EQ(loaded, two);
    EXPECT_EQ(file.entries().at("second").shape, (std::vector<std::int64_t>{3, 0}));
    EXPECT_EQ(file.entries().at("last").bytes, 0U);
}

TEST(Safetensors, HasExactlyTheBytesOfTheFormat) {
    const TemporaryDirectory directory;
    std::vector<float> w = {1, -2};
    const std::vector<Tensor> tensors = {ddp::tensor_of("w", std::span(w), {2})};
    ddp::write_safetensors(directory.file("a"), tensors, {{"k", "v"}});
    std::string header = R"({"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    while ((header.size() + 8) % 64 != 0) header += ' ';
    EXPECT_EQ(read_all(directory.file("a")), file_with(header, std::string("\0\0\x80\x3f\0\0\0\xc0", 8)));
}

TEST(Safetensors, RefusesEveryTruncation) {
    const TemporaryDirectory directory;
    Weights weights;
    ddp::write_safetensors(directory.file("a"), weights.tensors());
    const std::string whole = read_all(directory.file("a"));
    for (std::size_t length = 0; length < whole.size(); ++length) {
        write_all(directory.file("cut"), whole.substr(0, length));
        EXPECT_NE(refusal(directory.file("cut")), "accepted") << length;
    }
    write_all(directory.file("longer"), whole + "x");
    EXPECT_NE(refusal(directory.file("longer")), "accepted");
}

TEST(Safetensors, AcceptsOrRefusesEveryFlippedByteOfTheHeader) {
    const TemporaryDirectory directory;
    Weights weights;
    ddp::write_safetensors(directory.file("a"), weights.tensors());
    const std::string whole = read_all(directory.file("a"));
    std::mt19937 random(3);
    for (std::size_t i = 0; i < whole.size() - 44; ++i) {
        std::string bytes = whole;
        bytes[i] = static_cast<char>(random() % 256);
        write_all(directory.file("flipped"), bytes);
        Weights target;
        try {
            SafetensorsFile::open(directory.file("flipped")).read_into(target.tensors());
        } catch (const ddp::Error&) {
            continue;  // a refusal is fine too, as long as nothing is read out of bounds
        }
        EXPECT_EQ(target.w.size(), 6U);
    }
}

TEST(Safetensors, RefusesInconsistentHeaders) {
    const TemporaryDirectory directory;
    const std::string eight(8, '\0');
    const std::pair<const char*, const char*> cases[] = {
        {R"([])", "not a JSON object"},
        {R"({"w":)", "not a JSON object"},
        {R"({"w":3})", "has no dtype"},
        {R"({"w":{"dtype":"F32","shape":[2]}})", "has no dtype"},
        {R"({"w":{"dtype":"F128","shape":[8],"data_offsets":[0,8]}})", "not supported"},
        {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "malformed shape"},
        {R"({"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "malformed shape"},
        {R"({"w":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,8]}})", "malformed shape"},
        {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "malformed shape"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "malformed offsets"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "malformed offsets"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", "malformed offsets"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", "truncated"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", "needs 4"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "a hole or an overlap at byte 0"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "take 4 bytes, the file holds 8"},
        {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         "a hole or an overlap"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
         "the name 'w' stands twice"},
        {R"({"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}})", "the number 1e400 is out of range"},
        {R"({"__metadata__":{"a":1}})", "not a string"},
        {R"({"__metadata__":[]})", "not an object of strings"},
    };
    for (const auto& [header, expected] : cases) {
        write_all(directory.file("a"), file_with(header, eight));
        EXPECT_NE(refusal(directory.file("a")).find(expected), std::string::npos)
            << header << ": " << refusal(directory.file("a"));
    }
}

TEST(Safetensors, NamesTheFaultOfAHugeTensorInOneShortLine) {
    const TemporaryDirectory directory;
    std::string many = "1";
    for (int i = 0; i < 100'000; ++i) many += ",1";
    std::string some = "1";
    for (int i = 1; i < 64; ++i) some += ",1";
    const std::string name(100'000, 'x');
    for (const auto& [begin, shape] : {std::pair{std::string("w"), many},
                                       {"w", some},
                                       {name, "2,2"},
                                       {"a\\nb", "7"},
                                       {name + "\":1,\"w", "2"}}) {
        write_all(directory.file("a"), file_with("{\"" + begin + R"(":{"dtype":"F32","shape":[)" + shape +
                                                     R"(],"data_offsets":[0,8]}})",
                                                 std::string(8, '\0')));
        const std::string what = refusal(directory.file("a"));
        EXPECT_NE(what, "accepted");
        EXPECT_LT(what.size(), 500U) << shape.substr(0, 10);
        EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    }
}

TEST(Safetensors, ReadsAHeaderInTimeProportionalToItsSize) {
    const TemporaryDirectory directory;
    const auto seconds_for = [&](int tensors) {
        std::string header = "{";
        for (int i = 0; i < tensors; ++i)
            header +=
                "\"tensor-" + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
        header.back() = '}';
        write_all(directory.file("a"), file_with(header, ""));
        const auto begin = std::chrono::steady_clock::now();
        EXPECT_EQ(refusal(directory.file("a")), "accepted");
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const double few = seconds_for(2'000), many = seconds_for(64'000);
    EXPECT_LT(many, 32 * 10 * few);  // a search for every name would take a thousand times as long
}

TEST(Safetensors, RefusesAHugeHeaderBeforeItAllocatesMemory) {
    const TemporaryDirectory directory;
    for (const std::uint64_t size : {std::uint64_t{100'000'001}, UINT64_MAX, std::uint64_t{50'000'000}}) {
        write_all(directory.file("a"), std::string(reinterpret_cast<const char*>(&size), 8) + "{}");
        EXPECT_NE(refusal(directory.file("a")), "accepted");
    }
}

TEST(Safetensors, RefusesDeeplyNestedJson) {
    const TemporaryDirectory directory;
    write_all(directory.file("a"), file_with(std::string(1'000'000, '['), ""));
    EXPECT_NE(refusal(directory.file("a")), "accepted");
}

TEST(Safetensors, NamesTheTensorAndBothShapesOfAnotherModel) {
    const TemporaryDirectory directory;
    Weights weights;
    ddp::write_safetensors(directory.file("a"), weights.tensors());
    std::vector<float> small = {7, 7};
    const std::vector<Tensor> other = {ddp::tensor_of("w", std::span(small), {2})};
    try {
        SafetensorsFile::open(directory.file("a")).read_into(other);
        FAIL();
    } catch (const ddp::InvalidInput& error) {
        EXPECT_EQ(error.what(),
                  directory.file("a") + ": tensor 'w' is float32[2, 3] there, float32[2] in this program");
    }
    EXPECT_EQ(small, (std::vector<float>{7, 7}));
}

TEST(Safetensors, NamesTensorsThatAreMissingOnEitherSide) {
    const TemporaryDirectory directory;
    Weights weights;
    std::vector<Tensor> three = weights.tensors();
    three.pop_back();
    ddp::write_safetensors(directory.file("three"), three);
    ddp::write_safetensors(directory.file("four"), weights.tensors());
    const auto message = [&](const std::string& name, const std::vector<Tensor>& tensors) -> std::string {
        try {
            SafetensorsFile::open(directory.file(name)).require_same(tensors);
        } catch (const ddp::InvalidInput& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_NE(message("three", weights.tensors()).find("tensor 'none' is missing there"), std::string::npos);
    EXPECT_NE(message("four", three).find("'none' is float32[0, 5] there, missing in this program"),
              std::string::npos);
}

TEST(Safetensors, FindsNamesWithPyTorchsWrapperPrefix) {
    const TemporaryDirectory directory;
    std::vector<float> w = {1, 2}, b = {3}, loaded_w(2), loaded_b(1);
    const std::string path = directory.file("wrapped");
    ddp::write_safetensors(path, std::vector<Tensor>{ddp::tensor_of("module.w", std::span(w), {2}),
                                                     ddp::tensor_of("module.b", std::span(b), {1})});
    const std::vector<Tensor> own = {ddp::tensor_of("w", std::span(loaded_w), {2}),
                                     ddp::tensor_of("b", std::span(loaded_b), {1})};
    SafetensorsFile::open(path).read_into(own);
    EXPECT_EQ(loaded_w, w);
    EXPECT_EQ(loaded_b, b);
    EXPECT_EQ(message_of([&] {
                  SafetensorsFile::open(path).require_same({own.data(), 1});
              }),
              path + ": tensor 'module.b' is float32[1] there, missing in this program");
}

TEST(Safetensors, ReadsMatchingTensorsByOtherNamesAndReturnsTheUnmatched) {
    const TemporaryDirectory directory;
    std::vector<float> w = {1, 2}, head = {3}, loaded_w(2), fresh = {7};
    const std::string path = directory.file("pretrained");
    ddp::write_safetensors(path, std::vector<Tensor>{ddp::tensor_of("bert.w", std::span(w), {2}),
                                                     ddp::tensor_of("bert.head", std::span(head), {1})});
    const std::vector<Tensor> own = {ddp::tensor_of("w", std::span(loaded_w), {2}),
                                     ddp::tensor_of("classifier", std::span(fresh), {1})};
    const auto unmatched =
        ddp::load_weights(path, own, [](const std::string& name) { return "bert." + name; });
    EXPECT_EQ(unmatched.missing, std::vector<std::string>{"classifier"});
    EXPECT_EQ(unmatched.unused, std::vector<std::string>{"bert.head"});
    EXPECT_EQ(loaded_w, w);
    EXPECT_EQ(fresh[0], 7);
    const std::vector<Tensor> other = {ddp::tensor_of("classifier", std::span(fresh), {1}),
                                       ddp::tensor_of("w", std::span(loaded_w).first(1), {1})};
    EXPECT_EQ(message_of([&] {
                  (void)ddp::load_weights(path, other, [](const std::string& name) {
                      return "bert." + (name == "w" ? name : "head");
                  });
              }),
              path + ": tensor 'w' is float32[2] there, float32[1] in this program");
    EXPECT_EQ(fresh[0], 7) << "all checks come before the first write";
}

// Quantised models have such scales beside tensors that anybody can read.
TEST(Safetensors, RefusesATensorOfATypeThatItLacksOnlyWhenItIsAskedFor) {
    const TemporaryDirectory directory;
    const std::string path = directory.file("a");
    const std::pair<const char*, int> types[] = {{"I16", 16}, {"U16", 16},    {"U32", 32},    {"U64", 64},
                                                 {"C64", 64}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},
                                                 {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}};
    for (const auto& [type, bits] : types) {
        const std::size_t bytes = static_cast<std::size_t>(bits) * 4 / 8;
        const std::string end = std::to_string(4 + bytes);
        write_all(path,
                  file_with(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"scale":{"dtype":")" +
                                std::string(type) + R"(","shape":[2,2],"data_offsets":[4,)" + end + "]}}",
                            std::string(4 + bytes, '\0')));
        std::vector<float> w = {7}, scale(4);
        const Tensor weight = ddp::tensor_of("w", std::span(w), {1});
        const auto unmatched = ddp::load_weights(path, {&weight, 1});
        EXPECT_EQ(w[0], 0) << type;
        EXPECT_EQ(unmatched.unused, std::vector<std::string>{"scale"});
        const Tensor asked = ddp::tensor_of("scale", std::span(scale), {2, 2});
        EXPECT_EQ(message_of([&] {
                      (void)ddp::load_weights(path, {&asked, 1});
                  }),
                  path + ": tensor 'scale' is " + type + "[2, 2] there, float32[2, 2] in this program");
    }
    write_all(path, file_with(R"({"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "ab"));
    EXPECT_EQ(refusal(path), path + ": tensor 'w' has a malformed shape");
}

TEST(Safetensors, RefusesEverythingExceptRegularFiles) {
    const TemporaryDirectory directory;
    EXPECT_EQ(refusal(directory.path()), directory.path() + ": is a directory, not a file");
    ASSERT_EQ(::mkfifo(directory.file("fifo").c_str(), 0600), 0);
    EXPECT_EQ(refusal(directory.file("fifo")), directory.file("fifo") + ": is a pipe, not a file");
    EXPECT_THROW(SafetensorsFile::open(directory.file("absent")), ddp::Error);
}

TEST(Buffer, CanBeMadeFromContiguousContainers) {
    std::vector<double> vector(3);
    std::array<float, 4> array{};
    std::int32_t plain[5] = {};
    std::uint16_t halves[6] = {};
    EXPECT_EQ(ddp::buffer_of(vector).data, vector.data());
    EXPECT_EQ(ddp::buffer_of(vector).dtype, ddp::DType::F64);
    EXPECT_EQ(ddp::buffer_of(array).count, 4U);
    EXPECT_EQ(ddp::buffer_of(plain).bytes(), 20U);
    EXPECT_EQ(ddp::buffer_of(std::span(vector).first(2)).count, 2U);
    EXPECT_EQ(ddp::buffer_of(halves, ddp::DType::BF16).bytes(), 12U);
    EXPECT_EQ(ddp::tensor_of("w", array, {2, 2}).memory.data, array.data());
    EXPECT_EQ(message_of([&] { (void)ddp::buffer_of(array, ddp::DType::F16); }),
              "a buffer of float16 cannot lie in elements of 4 bytes");
}

TEST(Safetensors, RefusesToWriteInconsistentTensors) {
    const TemporaryDirectory directory;
    std::vector<float> w = {1, 2};
    const Tensor good = ddp::tensor_of("w", std::span(w), {2});
    EXPECT_THROW(ddp::write_safetensors(directory.file("a"), std::array{good, good}), ddp::InvalidInput);
    EXPECT_THROW(ddp::tensor_of("w", std::span(w), {3}), ddp::InvalidInput);
    EXPECT_FALSE(std::filesystem::exists(directory.file("a")));
}

}  // namespace
