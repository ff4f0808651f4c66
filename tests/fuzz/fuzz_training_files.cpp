#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "ddp/checkpoint.h"
#include "tests/fuzz/mutation.h"
#include "tests/support/temporary_directory.h"
#include "train/samples/data.h"

/// Every file that a training program reads: checkpoints (safetensors, state.json, latest) and data (IDX,
/// CSV). A fixed number of mutations from a fixed seed.
namespace ddprun::test {
namespace {

constexpr int kIterations = 6'000;

/// Refusals are what a reader may throw; anything else ends the program.
template <class Read>
void check_refusal(Read read) {
    try {
        read();
    } catch (const ddp::Error& error) {
        check_error(error.what());
    }
}

// ---- safetensors

const std::vector<std::string> kHeaders = {
    R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"n":{"dtype":"I64","shape":[1],"data_offsets":[24,32]}})",
    R"({"w":{"dtype":"F64","shape":[4],"data_offsets":[0,32]},"none":{"dtype":"U8","shape":[0,5],"data_offsets":[32,32]}})",
    R"({"scalar":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"rest":{"dtype":"F16","shape":[15],"data_offsets":[2,32]}})",
};

std::string safetensors_with(const std::string& header) {
    const std::uint64_t size = header.size();
    return std::string(reinterpret_cast<const char*>(&size), sizeof size) + header + std::string(32, '\x3f');
}

void take_safetensors(const MemoryFile& place, const std::string& bytes) {
    place.write(bytes);
    check_refusal([&] {
        const ddp::SafetensorsFile file = ddp::SafetensorsFile::open(place.path());
        for (const auto& [name, entry] : file.entries()) {
            if (entry.offset > bytes.size() || entry.bytes > bytes.size() - entry.offset)
                broken("a tensor lies outside of its file", name);
        }
        std::vector<float> w(6);
        const std::vector<ddp::Tensor> own = {ddp::tensor_of("w", std::span(w), {2, 3})};
        file.read_into(own);
    });
}

void fuzz_safetensors(std::mt19937& random) {
    const MemoryFile place;
    take_safetensors(place, safetensors_with(kHeaders[0]));
    std::vector<std::string> files;
    for (const std::string& header : kHeaders) files.push_back(safetensors_with(header));
    for (int i = 0; i < kIterations; ++i) {
        const std::size_t seed = random() % kHeaders.size();
        // A changed length hides the header behind it: two of three keep it true.
        std::string bytes = i % 3 == 0 ? files[seed] : kHeaders[seed];
        mutate(bytes, i % 3 == 0 ? files : kHeaders, random);
        mutate_some(bytes, kHeaders, random);
        take_safetensors(place, i % 3 == 0 ? bytes : safetensors_with(bytes));
    }
}

// ---- the rest of a checkpoint

void fuzz_checkpoints(std::mt19937& random) {
    const TemporaryDirectory directory;
    const MemoryFile state_file, latest_file;
    std::filesystem::create_symlink(state_file.path(), directory.file("state.json"));
    std::filesystem::create_symlink(latest_file.path(), directory.file("latest"));
    const std::vector<std::string> states = {
        R"({"format":1,"epoch":3,"step":640,"sampler":{"epoch":3,"consumed":64},"notes":{"run_id":"r1","optimizer":"sgd"}})",
        "step-000640\n"};
    const ddp::CheckpointDirectory checkpoints(directory.path());
    for (int i = 0; i < kIterations; ++i) {
        std::string state = states[0], latest = states[1];
        mutate(state, states, random);
        mutate(latest, states, random);
        state_file.write(state);
        latest_file.write(latest);
        check_refusal([&] {
            const ddp::TrainingState read = ddp::load_state(directory.path());
            if (read.step + 1 == 0 || read.epoch + 1 == 0) broken("a count is about to wrap", state);
        });
        check_refusal([&] { (void)checkpoints.latest(); });
    }
}

// ---- data

std::string big_endian(std::uint32_t value) {
    std::string bytes;
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift & 0xff);
    return bytes;
}

std::string csv() {
    std::string rows = "x,y,label\n";
    for (int i = 0; i < 24; ++i) rows += fmt::format("{}, -2.5,{}\n", i, i % 3);
    return rows;
}

void take_data(const std::string& path, const std::string& labels) {
    const Result<train::Samples> samples = train::read_samples(path, labels);
    if (!samples) return check_error(samples.error().what);
    if (samples->values.size() != samples->count() * samples->features)
        broken("samples without all their values", path);
    for (const float value : samples->values) {
        if (!std::isfinite(value) || (!samples->needs_scaling && std::abs(value) > 1))
            broken("a value out of bounds", path);
    }
    for (const std::int32_t label : samples->labels) {
        if (label < 0 || static_cast<std::size_t>(label) >= samples->classes)
            broken("a label out of bounds", path);
    }
}

void fuzz_data(std::mt19937& random) {
    const MemoryFile images_file, labels_file, csv_file;
    const std::string images = std::string("\0\0\x08\x03", 4) + big_endian(24) + big_endian(2) +
                               big_endian(3) + std::string(24 * 6, 'p');
    std::string labels = std::string("\0\0\x08\x01", 4) + big_endian(24);
    for (int i = 0; i < 24; ++i) labels += static_cast<char>(i % 3);
    const std::vector<std::string> files = {
        images, labels, csv(), "\"x\";\"y\"\n\"14,23\";-2.5;\"a \"\"word\"\"\"\n# of no sample\n"};
    for (int i = 0; i < kIterations; ++i) {
        std::string of_images = images, of_labels = labels, of_csv = csv();
        mutate(random() % 2 == 0 ? of_images : of_labels, files, random);
        mutate(of_csv, files, random);
        mutate_some(of_csv, files, random);
        images_file.write(of_images);
        labels_file.write(of_labels);
        csv_file.write(of_csv);
        take_data(images_file.path(), labels_file.path());
        take_data(csv_file.path(), "");
    }
}

int run() {
    std::mt19937 random(20261123);
    fuzz_safetensors(random);
    fuzz_checkpoints(random);
    fuzz_data(random);
    fmt::print("fuzz: {} mutated files of each kind taken\n", kIterations);
    return 0;
}

}  // namespace
}  // namespace ddprun::test

int main() { return ddprun::test::run(); }
