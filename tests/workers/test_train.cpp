#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

#include "ddp/recovery.h"
#include "ddp/recovery/kept.h"
#include "ddp/testing.h"
#include "env/clock.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "tests/support/temporary_directory.h"
#include "train/agreement.h"
#include "train/compute.h"
#include "train/compute_device.h"
#include "train/matrix.h"
#include "train/mlp.h"
#include "train/options.h"
#include "train/report.h"
#include "train/samples/data.h"
#include "train/trainer.h"

namespace {

using ddprun::test::TemporaryDirectory;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using train::ExitCode;
using train::Mlp;
using train::Options;
using train::Samples;
using train::StartupError;

ddprun::Result<Options> parse(std::vector<const char*> arguments) { return train::parse_options(arguments); }

std::string refusal(std::vector<const char*> arguments) {
    const auto options = parse(std::move(arguments));
    return options ? "accepted" : options.error().what;
}

TEST(TrainOptions, TakeValuesAfterASpaceOrAnEqualsSign) {
    const auto options = parse({"--lr", "0.5", "--hidden=64,32", "--optimizer", "adamw", "--resume",
                                "--no-scale-lr", "--seed=18446744073709551615", "--batch-size", "8"});
    ASSERT_TRUE(options) << options.error().what;
    EXPECT_EQ(options->base_learning_rate(), 0.5);
    EXPECT_EQ(options->hidden, (std::vector<std::size_t>{64, 32}));
    EXPECT_EQ(options->optimizer, train::OptimizerKind::AdamW);
    EXPECT_EQ(options->seed, UINT64_MAX);
    EXPECT_EQ(options->batch_size, 8U);
    EXPECT_TRUE(options->resume);
    EXPECT_FALSE(options->scale_learning_rate);
}

TEST(TrainOptions, HelpSeparatesNamesAndMeanings) {
    const std::string text = train::usage();
    for (const std::string_view line : ddprun::split(text, '\n')) {
        EXPECT_LE(line.size(), 100U) << line;
        if (!line.starts_with("  --")) continue;
        const std::size_t gap = line.find("  ", 2);
        EXPECT_TRUE(gap == line.npos || line.find_first_not_of(' ', gap) == 28) << line;
        EXPECT_LE(gap == line.npos ? line.size() : gap, 60U) << line;
    }
    EXPECT_NE(text.find("--keep-data auto|device|host\n                            on CUDA, where"),
              std::string::npos)
        << text;
}

TEST(TrainOptions, HaveADefaultLearningRatePerOptimizer) {
    EXPECT_EQ(parse({})->base_learning_rate(), 0.02);
    EXPECT_EQ(parse({"--optimizer=adamw"})->base_learning_rate(), 0.001);
}

TEST(TrainOptions, NameTheWrongOptionAndValue) {
    EXPECT_EQ(refusal({"--lr", "x"}), "--lr: 'x' is not a number");
    EXPECT_EQ(refusal({"--lr", "-1"}), "--lr: '-1' is not a number of at least 0");
    EXPECT_EQ(refusal({"--optimizer", "adam"}), "--optimizer: 'adam' is none of sgd, adamw");
    EXPECT_EQ(refusal({"--lrr", "1"}), "--lrr: unknown option; did you mean --lr?");
    EXPECT_EQ(refusal({"--resume=yes"}), "--resume: takes no value");
    EXPECT_EQ(refusal({"--epochs"}), "--epochs: N is missing");
    EXPECT_EQ(refusal({"digits.csv"}), "'digits.csv': train takes options only; see train --help");
    for (const char* epochs : {"0", "-3", "1e3", "", "99999999999"})
        EXPECT_TRUE(refusal({"--epochs", epochs}).starts_with("--epochs: ")) << refusal({"--epochs", epochs});
    for (const char* hidden : {"", "64,", "a", "0", "999999"})
        EXPECT_TRUE(refusal({"--hidden", hidden}).starts_with("--hidden: ")) << refusal({"--hidden", hidden});
}

TEST(TrainOptions, RefuseContradictions) {
    EXPECT_EQ(refusal({"--device", "gpu"}), "--device: 'gpu' is none of auto, cuda, cpu");
    EXPECT_EQ(refusal({"--precision", "fp8"}), "--precision: 'fp8' is none of fp32, tf32, bf16, fp16");
    EXPECT_EQ(refusal({"--backend", "gloo"}), "--backend: 'gloo' is none of auto, nccl, staged, cpu, mpi");
    EXPECT_EQ(refusal({"--device=cpu", "--precision=bf16"}), "--precision bf16 needs --device cuda");
    EXPECT_EQ(refusal({"--device=cpu", "--cuda-graph"}), "--cuda-graph needs --device cuda");
    EXPECT_EQ(refusal({"--shard", "all"}),
              "--shard: 'all' is none of none, optimizer, gradients, parameters");
    EXPECT_EQ(refusal({"--shard=optimizer", "--cuda-graph"}),
              "--shard: not with --cuda-graph; leave --shard none");
    EXPECT_EQ(refusal({"--shard=optimizer", "--precision=bf16"}),
              "--shard: not with --precision bf16; leave --shard none");
    EXPECT_EQ(refusal({"--device=cpu", "--keep-data=device"}), "--keep-data device needs --device cuda");
    EXPECT_EQ(refusal({"--keep-data=disk"}), "--keep-data: 'disk' is none of auto, device, host");
    EXPECT_EQ(refusal({"--device=cpu", "--backend=nccl"}), "--backend nccl needs --device cuda");
    EXPECT_EQ(refusal({"--device=cuda", "--backend=cpu"}),
              "--backend: cpu takes host memory; it needs --device cpu");
    EXPECT_EQ(refusal({"--backend=cpu", "--cuda-graph"}),
              "--cuda-graph needs --device cuda, and --backend cpu takes host memory");
    EXPECT_EQ(
        refusal({"--backend=staged", "--cuda-graph"}),
        "--cuda-graph: the staged backend goes through the host, which no graph can hold; use --backend "
        "nccl");
    EXPECT_EQ(refusal({"--verify-every=1", "--cuda-graph"}),
              "--verify-every: the host compares, which no graph can hold; leave out --cuda-graph");
    EXPECT_EQ(refusal({"--data=synthetic:100,4,2", "--labels=x"}),
              "--labels: synthetic data has labels of its own");
    EXPECT_EQ(refusal({"--clip=0"}), "--clip: a norm of 0 leaves nothing of the gradients");
    EXPECT_EQ(refusal({"--schedule=sine"}), "--schedule: 'sine' is none of constant, cosine, linear, step");
    EXPECT_EQ(refusal({"--device=cpu", "--deterministic", "--backend=cpu"}), "accepted");
    EXPECT_EQ(refusal({"--accumulate=4", "--clip=1", "--schedule=cosine", "--warmup=100"}), "accepted");
    EXPECT_EQ(refusal({"--device=cuda", "--precision=fp16", "--cuda-graph", "--backend=nccl",
                       "--accumulate=2", "--clip=1"}),
              "accepted");
}

const train::CudaFacts kNoCuda{.devices = 0, .problem = "no driver", .local_rank = 1};
const train::CudaFacts kTwoDevices{.devices = 2, .problem = "", .local_rank = 5};

train::DeviceChoice choice(std::vector<const char*> arguments, const train::CudaFacts& facts) {
    return *train::choose_device(*parse(std::move(arguments)), facts);
}

TEST(DeviceChoice, AutoTakesCudaIfPossibleAndOtherwiseSaysWhyNot) {
    EXPECT_EQ(choice({}, kTwoDevices).device, (ddp::Device{ddp::Device::Kind::Cuda, 1}));
    EXPECT_EQ(choice({}, kTwoDevices).why, "auto: 2 CUDA devices");
    EXPECT_EQ(choice({}, kNoCuda).device, ddp::Device{});
    EXPECT_EQ(choice({}, kNoCuda).why, "auto: no driver");
}

TEST(DeviceChoice, TakesTheCpuWhenItOrItsBackendIsRequested) {
    EXPECT_EQ(choice({"--device=cpu"}, kTwoDevices).device, ddp::Device{});
    EXPECT_EQ(choice({"--backend=cpu"}, kTwoDevices).device, ddp::Device{});
    EXPECT_FALSE(train::may_use_cuda(*parse({"--device=cpu"})));
    EXPECT_FALSE(train::may_use_cuda(*parse({"--backend=cpu"})));
    EXPECT_TRUE(train::may_use_cuda(*parse({})));
}

TEST(DeviceChoice, NamesTheOptionThatNeedsAMissingDevice) {
    const auto refused = [](std::vector<const char*> arguments) {
        const auto chosen = train::choose_device(*parse(std::move(arguments)), kNoCuda);
        return chosen ? "accepted" : chosen.error().what;
    };
    EXPECT_EQ(refused({"--device=cuda"}), "--device cuda: no driver");
    EXPECT_EQ(refused({"--precision=bf16"}), "--precision bf16: no driver");
    EXPECT_EQ(refused({"--cuda-graph"}), "--cuda-graph: no driver");
    EXPECT_EQ(refused({"--backend=staged"}), "--backend staged: no driver");
}

std::string idx(const std::string& header, const std::string& bytes) { return header + bytes; }
const std::string kImagesHeader("\0\0\x08\x03\0\0\0\x14\0\0\0\x01\0\0\0\x02", 16);  // 20 images of 1x2
const std::string kLabelsHeader("\0\0\x08\x01\0\0\0\x14", 8);

std::string counting(std::size_t count, int modulus) {
    std::string bytes;
    for (std::size_t i = 0; i < count; ++i) bytes += static_cast<char>(i % static_cast<std::size_t>(modulus));
    return bytes;
}

void write_all(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string data_refusal(const std::string& path, const std::string& labels = "") {
    const auto samples = train::read_samples(path, labels);
    return samples ? "accepted" : samples.error().what;
}

TEST(TrainData, ReadsIdxImagesWithTheirLabels) {
    const TemporaryDirectory temporary;
    write_all(temporary.file("my-images-idx3-ubyte"), idx(kImagesHeader, counting(40, 40)));
    write_all(temporary.file("my-labels-idx1-ubyte"), idx(kLabelsHeader, counting(20, 3)));
    const auto samples = train::read_samples(temporary.file("my-images-idx3-ubyte"), "");
    ASSERT_TRUE(samples) << samples.error().what;
    EXPECT_EQ(samples->name, "my");
    EXPECT_EQ(samples->count(), 20U);
    EXPECT_EQ(samples->features, 2U);
    EXPECT_EQ(samples->classes, 3U);
    EXPECT_EQ(samples->labels[4], 1);
    EXPECT_EQ(samples->values[39], 1.0F);
    EXPECT_EQ(samples->values[13], 13.0F / 39);
}

TEST(TrainData, RefusesEveryTruncationOfAnIdxFile) {
    const TemporaryDirectory temporary;
    const std::string images = temporary.file("a-images-idx3-ubyte"),
                      labels = temporary.file("a-labels-idx1-ubyte");
    const std::string whole_images = idx(kImagesHeader, counting(40, 40)),
                      whole_labels = idx(kLabelsHeader, counting(20, 3));
    write_all(labels, whole_labels);
    for (std::size_t length = 0; length < whole_images.size(); ++length) {
        write_all(images, whole_images.substr(0, length));
        EXPECT_NE(data_refusal(images), "accepted") << length;
    }
    write_all(images, whole_images);
    for (std::size_t length = 0; length < whole_labels.size(); ++length) {
        write_all(labels, whole_labels.substr(0, length));
        EXPECT_NE(data_refusal(images), "accepted") << length;
    }
    write_all(labels, whole_labels + "x");
    EXPECT_EQ(data_refusal(images), labels + ": 1 bytes too long for its IDX header");
}

std::string names_as_labels(int rows) {
    std::string text;
    for (int i = 0; i < rows; ++i) text += "1,2,name" + std::to_string(i) + "\n";
    return text;
}

TEST(TrainData, NamesTheFaultOfAFile) {
    const TemporaryDirectory temporary;
    const auto refused = [&](const std::string& content) {
        write_all(temporary.file("x"), content);
        return data_refusal(temporary.file("x"));
    };
    EXPECT_EQ(refused(""), temporary.file("x") + ": is empty");
    EXPECT_EQ(refused("\x1f\x8b\x08"), temporary.file("x") + ": is compressed; unpack it with gunzip first");
    EXPECT_EQ(refused(std::string("\x7f"
                                  "ELF\0",
                                  5)),
              temporary.file("x") + ": neither IDX nor CSV");
    EXPECT_EQ(refused(std::string("\0\0\x0d\x03", 4)),
              temporary.file("x") + ": IDX of element type 0x0d; only bytes (0x08) are read");
    EXPECT_EQ(refused(kLabelsHeader + counting(20, 3)),
              temporary.file("x") + ": has one dimension: these are labels, not images");
    EXPECT_EQ(refused(kImagesHeader + counting(40, 40)),
              temporary.file("x") + ": no labels: name them with --labels");
    EXPECT_EQ(refused("1,2,0\n1,2\n"), temporary.file("x") + ": line 2: 2 columns, the lines before have 3");
    EXPECT_EQ(refused("1,2,0\n1,b,0\n"), temporary.file("x") + ": line 2: column 2: 'b' is not a number");
    EXPECT_EQ(refused("1,2,0\n1,nan,0\n"), temporary.file("x") + ": line 2: column 2: 'nan' is not a number");
    EXPECT_EQ(refused("1,2,0\n1,2,0.5\n"),
              temporary.file("x") + ": line 2: label: '0.5' is no class: a whole number or a word");
    EXPECT_EQ(refused("1,2,a\n1,2,\n"),
              temporary.file("x") + ": line 2: label: '' is no class: a whole number or a word");
    EXPECT_EQ(refused("1,2,0\n\"1,2,0\n"), temporary.file("x") + ": line 2: a quote does not end");
    EXPECT_EQ(refused("1,2,0\n\"1\"2,3,0\n"),
              temporary.file("x") + ": line 2: something stands behind a quote");
    EXPECT_EQ(
        refused(names_as_labels(30)),
        temporary.file("x") + ": its last column has 30 different words in 30 rows: it has to be the class");
    EXPECT_EQ(refused("1,2,0\n1,2,1\n"), temporary.file("x") + ": 2 samples are too few to train on");
    EXPECT_EQ(refused("plain text\nmore\n"),
              temporary.file("x") + ": line 2: not CSV with values and a label");
    EXPECT_EQ(data_refusal(temporary.path()), temporary.path() + ": is a directory, not a file");
    ASSERT_EQ(::mkfifo(temporary.file("fifo").c_str(), 0600), 0);
    EXPECT_EQ(data_refusal(temporary.file("fifo")), temporary.file("fifo") + ": is a pipe, not a file");
}

TEST(TrainData, ReportsAMissingFileAsNotFound) {
    const TemporaryDirectory empty;
    const auto samples = train::read_samples(empty.file("x.csv"), "");
    ASSERT_FALSE(samples);
    EXPECT_EQ(samples.error().code, ddprun::Errc::NotFound);
    EXPECT_EQ(samples.error().what, empty.file("x.csv") + ": No such file or directory");
}

TEST(TrainData, ReadsCsvWithAndWithoutHeaderAndWindowsLineEnds) {
    const TemporaryDirectory temporary;
    std::string rows;
    for (int i = 0; i < 30; ++i) rows += std::to_string(i) + ", -2.5," + std::to_string(i % 2) + "\r\n";
    write_all(temporary.file("plain.csv"), rows);
    write_all(temporary.file("header.csv"), "x,y,label\r\n" + rows + "\r\n");
    const auto plain = train::read_samples(temporary.file("plain.csv"), ""),
               header = train::read_samples(temporary.file("header.csv"), "");
    ASSERT_TRUE(plain) << plain.error().what;
    ASSERT_TRUE(header) << header.error().what;
    EXPECT_EQ(plain->count(), 30U);
    EXPECT_EQ(plain->fingerprint(), header->fingerprint());
}

TEST(TrainData, ReadsTheSameSamplesFromEveryFormatOfATable) {
    const TemporaryDirectory temporary;
    const auto samples_of = [&](const std::string& head, const char* format,
                                const std::vector<const char*>& classes) {
        std::string text = head;
        for (int i = 0; i < 30; ++i)
            text += fmt::format(fmt::runtime(format), i, i % 2 == 0 ? "0.5" : "-2.25",
                                i % 2 == 0 ? "0,5" : "-2,25", classes[static_cast<std::size_t>(i % 3)]);
        write_all(temporary.file("x"), text);
        const auto samples = train::read_samples(temporary.file("x"), "");
        EXPECT_TRUE(samples) << format << ": " << samples.error().what;
        EXPECT_EQ(samples->features, 2U);
        EXPECT_EQ(samples->classes, 3U);
        return samples->fingerprint();
    };
    const std::uint64_t plain = samples_of("", "{0},{1},{3}\n", {"0", "1", "2"});
    EXPECT_EQ(samples_of("\"a\",\"b, or c\",\"class\"\n", "\"{0}\",\"{1}\",\"{3}\"\n", {"0", "1", "2"}),
              plain);
    EXPECT_EQ(samples_of("\xEF\xBB\xBF"
                         "a;b;class\r\n",
                         "{0};{1};{3}\r\n", {"0", "1", "2"}),
              plain);
    EXPECT_EQ(samples_of("a;b;class\n", "{0};{2};{3}\n", {"barolo", "grignolino", "merlot"}), plain)
        << "decimal commas, words";
    EXPECT_EQ(
        samples_of("# measured by hand\n", "{0}\t{1}\t\"{3}\"\n", {"barolo", "grignolino, red", "merlot"}),
        plain);
    EXPECT_EQ(samples_of("", "{0},{1},{3}\n", {"-1", "0", "1"}), plain)
        << "classes that are not indices are words";
}

TEST(TrainData, GeneratesTheSameSamplesOnlyForTheSameSeed) {
    const train::SyntheticSize size{100, 8, 3};
    const Samples samples = train::make_samples(size, 1);
    EXPECT_EQ(samples.count(), 100U);
    EXPECT_EQ(samples.fingerprint(), train::make_samples(size, 1).fingerprint());
    EXPECT_NE(samples.fingerprint(), train::make_samples(size, 2).fingerprint());
    for (const float value : samples.values) EXPECT_LE(std::abs(value), 1.0F);
    EXPECT_EQ(*std::max_element(samples.labels.begin(), samples.labels.end()), 2);
    // A larger set begins with the same samples.
    const Samples more = train::make_samples({150, 8, 3}, 1);
    EXPECT_TRUE(std::equal(samples.values.begin(), samples.values.end(), more.values.begin()));
}

TEST(TrainData, NamesTheFaultOfASyntheticSize) {
    EXPECT_EQ(refusal({"--data", "synthetic:100,4"}),
              "--data: 'synthetic:100,4' is not synthetic:SAMPLES,FEATURES,CLASSES");
    EXPECT_EQ(refusal({"--data", "synthetic:x,4,2"}), "--data: samples: 'x' is not a number");
    EXPECT_EQ(refusal({"--data", "synthetic:100000000,1048576,2"}),
              "--data: 'synthetic:100000000,1048576,2' has too many values to hold in memory");
    for (const char* data : {"synthetic:", "synthetic:19,4,2", "synthetic:100,0,2", "synthetic:100,4,1"})
        EXPECT_TRUE(refusal({"--data", data}).starts_with("--data: ")) << refusal({"--data", data});
    EXPECT_EQ(refusal({"--data", "synthetic:100,4,2"}), "accepted");
}

TEST(TrainData, HoldsOutTheSameTenthEveryTime) {
    const train::Split split = train::split_samples(1797);
    EXPECT_EQ(split.held_out.size(), 179U);
    EXPECT_EQ(split.training.size(), 1618U);
    std::vector<std::size_t> all = split.training;
    all.insert(all.end(), split.held_out.begin(), split.held_out.end());
    std::sort(all.begin(), all.end());
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i);
    EXPECT_EQ(train::split_samples(1797).held_out, split.held_out);
}

std::vector<float> random_values(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(random() % 2001) / 1000 - 1;
    return values;
}

void expect_product(decltype(train::multiply)* multiply, train::Transposed which) {
    for (const auto& [m, n, k] :
         {std::array<std::size_t, 3>{1, 1, 1}, {3, 5, 7}, {16, 10, 128}, {33, 17, 65}, {4, 3, 0}}) {
        const std::vector<float> a = random_values(m * k, 1), b = random_values(k * n, 2);
        std::vector<float> c(m * n, 99);
        multiply(which, m, n, k, a.data(), b.data(), c.data(), train::Into::Replace);
        multiply(which, m, n, k, a.data(), b.data(), c.data(), train::Into::Add);
        for (std::size_t i = 0; i < m; ++i) {
            for (std::size_t j = 0; j < n; ++j) {
                double expected = 0;
                for (std::size_t p = 0; p < k; ++p)
                    expected +=
                        static_cast<double>(which == train::Transposed::A ? a[p * m + i] : a[i * k + p]) *
                        (which == train::Transposed::B ? b[j * k + p] : b[p * n + j]);
                ASSERT_NEAR(c[i * n + j], 2 * expected, 2e-4) << m << " " << n << " " << k;
            }
        }
    }
}

TEST(Matrix, ProductsMatchTheirDefinition) {
    for (const auto which : {train::Transposed::None, train::Transposed::A, train::Transposed::B}) {
        expect_product(train::multiply, which);
        expect_product(train::plain::multiply, which);
    }
}

TEST(Matrix, NeedsAddressSpaceForEveryThread) {
    const auto mebibytes = [](std::uint64_t n) { return n << 20; };
    EXPECT_EQ(train::matrix_memory_shortage(mebibytes(256), "ulimit -v", 1), "");
    EXPECT_EQ(train::matrix_memory_shortage(mebibytes(255), "ulimit -v", 1),
              "ulimit -v allows 255 MiB, and OpenBLAS with 1 thread needs 256 MiB: raise it");
    EXPECT_EQ(
        train::matrix_memory_shortage(mebibytes(256), "ulimit -d", 8),
        "ulimit -d allows 256 MiB, and OpenBLAS with 8 threads needs 1.6 GiB: raise it, or set OMP_NUM_THREADS=1");
    EXPECT_EQ(train::matrix_memory_shortage(mebibytes(1600), "ulimit -d", 8), "");
}

/// The mean loss of the same perceptron in double, as an independent reference: linear layers with ReLU
/// between them, softmax cross-entropy at the end. parameters: weights [outputs, inputs] and biases in turn.
double loss_in_double(const std::vector<std::vector<double>>& parameters, const std::vector<float>& values,
                      const std::vector<std::int32_t>& labels) {
    const std::size_t inputs = values.size() / labels.size();
    double sum = 0;
    for (std::size_t s = 0; s < labels.size(); ++s) {
        std::vector<double> now(values.begin() + static_cast<std::ptrdiff_t>(s * inputs),
                                values.begin() + static_cast<std::ptrdiff_t>((s + 1) * inputs));
        for (std::size_t l = 0; l < parameters.size(); l += 2) {
            std::vector<double> next = parameters[l + 1];
            for (std::size_t o = 0; o < next.size(); ++o) {
                for (std::size_t i = 0; i < now.size(); ++i)
                    next[o] += parameters[l][o * now.size() + i] * now[i];
                if (l + 2 < parameters.size()) next[o] = std::max(next[o], 0.0);
            }
            now = next;
        }
        double all = 0;
        for (const double logit : now) all += std::exp(logit);
        sum += std::log(all) - now[static_cast<std::size_t>(labels[s])];
    }
    return sum / static_cast<double>(labels.size());
}

TEST(Mlp, GradientsAreTheSlopesOfTheLossInDoublePrecision) {
    const std::unique_ptr<train::Compute> compute = train::make_cpu_compute();
    Mlp mlp({6, 5, 4, 3}, 3, *compute);
    const std::vector<float> values = random_values(6 * 7, 4);
    const std::vector<std::int32_t> labels = {0, 1, 2, 2, 1, 0, 1};
    std::vector<ddp::Tensor> parameters = mlp.parameters();
    std::vector<std::vector<float>> gradients;
    for (const ddp::Tensor& parameter : parameters) gradients.emplace_back(parameter.memory.count);
    std::vector<std::size_t> order;
    mlp.stage({values.data(), labels.data(), nullptr, labels.size()});
    mlp.forward();
    mlp.backward(
        {[&](std::size_t i) { return gradients[i].data(); }, [&](std::size_t i) { order.push_back(i); }});
    EXPECT_EQ(order, (std::vector<std::size_t>{5, 4, 3, 2, 1, 0}));

    std::vector<std::vector<double>> wide;
    for (const ddp::Tensor& parameter : parameters) {
        const auto* const numbers = static_cast<const float*>(parameter.memory.data);
        wide.emplace_back(numbers, numbers + parameter.memory.count);
    }
    const double loss = loss_in_double(wide, values, labels);
    EXPECT_NEAR(compute->take_score().loss_sum / 7, loss, 1e-6 * loss);

    // The slopes are right to nine digits, so the tolerance is for the rounding of the gradients: sums whose
    // terms may be as large as the largest slope.
    constexpr double kStep = 1e-5, kRounding = 1e-6;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        std::vector<double> slopes;
        for (double& weight : wide[i]) {
            const double before = weight;
            weight = before + kStep;
            const double above = loss_in_double(wide, values, labels);
            weight = before - kStep;
            const double below = loss_in_double(wide, values, labels);
            weight = before;
            slopes.push_back((above - below) / (2 * kStep));
        }
        const double largest = std::abs(*std::max_element(
            slopes.begin(), slopes.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
        EXPECT_GT(largest, 1e-3) << parameters[i].name << ": the comparison would be empty";
        for (std::size_t e = 0; e < slopes.size(); ++e)
            EXPECT_NEAR(gradients[i][e], slopes[e], kRounding * largest) << parameters[i].name << " " << e;
    }
}

TEST(Mlp, AcceptsHugeLogits) {
    const std::unique_ptr<train::Compute> compute = train::make_cpu_compute();
    Mlp mlp({1, 2}, 0, *compute);
    const std::vector<float> values = {1e30F};
    const std::vector<std::int32_t> labels = {0};
    mlp.stage({values.data(), labels.data(), nullptr, labels.size()});
    mlp.forward();
    EXPECT_TRUE(std::isfinite(compute->take_score().loss_sum));
}

TEST(Mlp, HasTheSameFirstWeightsOnlyForTheSameSeed) {
    const auto first_weight = [](std::uint64_t seed) {
        const std::unique_ptr<train::Compute> compute = train::make_cpu_compute();
        return *static_cast<float*>(Mlp({4, 3}, seed, *compute).parameters()[0].memory.data);
    };
    EXPECT_EQ(first_weight(5), first_weight(5));
    EXPECT_NE(first_weight(5), first_weight(6));
}

Samples two_clouds() {
    Samples samples{"clouds", 2, 2, {}, {}};
    std::mt19937 random(1);
    for (int i = 0; i < 200; ++i) {
        const int label = i % 2;
        const auto noise = [&] { return static_cast<float>(random() % 1000) / 2000 - 0.25F; };
        samples.values.push_back(static_cast<float>(label) + noise());
        samples.values.push_back(static_cast<float>(1 - label) + noise());
        samples.labels.push_back(label);
    }
    return samples;
}

/// 178 rows of 13 columns like laboratory measurements: hundredths next to thousands. The three classes
/// differ in all columns once they have the same scale, and before that nearly only in the small ones.
Samples measurements() {
    Samples samples{"wine", 13, 3, {}, {}, true};
    std::mt19937 random(7);
    const auto noise = [&] { return static_cast<double>(random() % 1000) / 1000 - 0.5; };
    for (int row = 0; row < 178; ++row) {
        const int label = row % 3;
        for (int column = 0; column < 13; ++column) {
            const double scale = std::pow(10.0, column % 6 - 2), center = column % 3 == label ? 1 : 0;
            const bool is_large = column % 6 == 5;
            samples.values.push_back(static_cast<float>(scale * (3 + (is_large ? 0 : center) + noise())));
        }
        samples.labels.push_back(label);
    }
    return samples;
}

train::ComputeDevice on_the_cpu() {
    Options options;
    options.device = train::DeviceKind::Cpu;
    return *train::open_compute_device(options, 0);
}

struct Outcome {
    train::Summary summary;
    std::vector<std::string> lines;
};

Outcome train_with(int ranks, const Options& options, std::optional<std::string> only_run = std::nullopt,
                   const std::string& run_id = "job1", const Samples& samples = two_clouds()) {
    Outcome outcome;
    ddp::testing::run_ranks(ranks, [&](ddp::ProcessGroup& group) {
        const train::ComputeDevice device = on_the_cpu();
        train::Trainer trainer(group, device, options, samples,
                               [&](const std::string& line) { outcome.lines.push_back(line); });
        if (options.resume) trainer.resume(only_run);
        train::Summary summary = trainer.run(run_id);
        if (group.rank() == 0) outcome.summary = std::move(summary);
    });
    return outcome;
}

Options options_for(const TemporaryDirectory& temporary, std::size_t batch, std::uint64_t epochs) {
    Options options;
    options.hidden = {8};
    options.batch_size = batch;
    options.epochs = epochs;
    options.learning_rate = 0.05;
    options.scale_learning_rate = false;
    options.checkpoint_dir = temporary.file("checkpoints");
    return options;
}

TEST(Trainer, GivesTheSameLossCurveForTheSameJointBatchOnAnyNumberOfWorkers) {
    const TemporaryDirectory temporary;
    const Outcome alone = train_with(1, options_for(temporary, 12, 5));
    EXPECT_GT(alone.summary.held_out_accuracy, 0.95);
    for (const int ranks : {2, 3, 4}) {
        const Outcome together =
            train_with(ranks, options_for(temporary, 12 / static_cast<std::size_t>(ranks), 5));
        ASSERT_EQ(together.summary.epochs.size(), 5U);
        for (std::size_t e = 0; e < 5; ++e)
            EXPECT_NEAR(together.summary.epochs[e].loss, alone.summary.epochs[e].loss, 1e-5)
                << ranks << " workers, epoch " << e;
        EXPECT_EQ(together.summary.epochs[4].held_out_accuracy, alone.summary.epochs[4].held_out_accuracy);
    }
}

TEST(Trainer, GivesTheSameLossCurveForAccumulatedBatches) {
    const TemporaryDirectory temporary;
    const Outcome at_once = train_with(1, options_for(temporary, 12, 5));
    for (const int ranks : {1, 2}) {
        Options options = options_for(temporary, 12 / 3 / static_cast<std::size_t>(ranks), 5);
        options.accumulate = 3;
        const Outcome in_parts = train_with(ranks, options);
        ASSERT_EQ(in_parts.summary.epochs.size(), 5U);
        for (std::size_t e = 0; e < 5; ++e)
            EXPECT_NEAR(in_parts.summary.epochs[e].loss, at_once.summary.epochs[e].loss, 1e-5)
                << ranks << " workers, epoch " << e;
    }
}

TEST(Trainer, ScalesTheLearningRateWithTheJointBatch) {
    Options options;
    options.learning_rate = 0.01;
    options.accumulate = 4;
    EXPECT_DOUBLE_EQ(train::learning_rate(options, 2), 0.08);
    options.scale_learning_rate = false;
    EXPECT_DOUBLE_EQ(train::learning_rate(options, 2), 0.01);
}

TEST(Trainer, ResumesToTheSameBitsWithAScheduleAndClipping) {
    const TemporaryDirectory one, two, plain;
    const auto with = [](Options options) {
        options.schedule = ddp::Schedule::Shape::Step;
        options.warmup = 7;
        options.clip = 0.05;
        options.accumulate = 2;
        return options;
    };
    const Outcome whole = train_with(2, with(options_for(one, 6, 4)));
    Options first = with(options_for(two, 6, 4));
    const Samples samples = two_clouds();
    ddp::testing::run_ranks(2, [&](ddp::ProcessGroup& group) {
        int votes = 0;
        const train::ComputeDevice device = on_the_cpu();
        train::Trainer trainer(group, device, first, samples, [](const std::string&) {},
                               {[&] { return ++votes == 3; }, {}});
        EXPECT_TRUE(trainer.run("job1").stopped);
    });
    first.resume = true;
    EXPECT_EQ(train_with(2, first).summary.digest, whole.summary.digest);
    EXPECT_NE(train_with(2, options_for(plain, 6, 4)).summary.digest, whole.summary.digest);
}

struct RecoveredRun {
    train::Summary summary;
    ddprun::Duration until_loss{};  ///< from the first step on
};

/// Three ranks train for 40 steps, 10 an epoch; the third can be lost after step 38.
RecoveredRun train_recovering(const Options& options, bool loses_rank_2) {
    RecoveredRun result;
    ddprun::TimePoint first_step{};
    const int generations = ddp::testing::run_recovering(3, [&](const ddp::Context& context) {
        const train::ComputeDevice device = on_the_cpu();
        ddp::Recovery recovery(context);
        const auto lose = [&](std::uint64_t steps) {
            if (context.rank() != 2 || context.generation() != 1) return false;
            if (steps == 1) first_step = ddprun::MonotonicClock::now();
            if (loses_rank_2 && steps == 38) {
                result.until_loss = ddprun::MonotonicClock::now() - first_step;
                ddp::KeptMemory(context.env().kept_fd, 2).reset();  // as on another node
                throw ddp::Error("lost");
            }
            return false;
        };
        train::Trainer trainer({context.rank(), 3}, device, options, two_clouds(), [](const std::string&) {},
                               {[] { return false; }, lose});
        trainer.keep_in(recovery);
        recovery.run([&](ddp::ProcessGroup& group, const ddp::Start& start) {
            trainer.attach(group, start.is_new());
            train::Summary summary = trainer.run("job1");
            if (group.rank() == 2) result.summary = std::move(summary);
        });
    });
    EXPECT_EQ(generations, loses_rank_2 ? 2 : 1);
    return result;
}

TEST(Trainer, AveragesAnEpochOverTheSamplesWhoseScoresARecoveryHasKept) {
    const TemporaryDirectory temporary;
    const auto last_epoch = [&](bool loses_rank_2) {
        return train_recovering(options_for(temporary, 6, 4), loses_rank_2).summary.epochs.back();
    };
    const train::EpochResult undisturbed = last_epoch(false), disturbed = last_epoch(true);
    ASSERT_EQ(undisturbed.training_accuracy, 1);
    EXPECT_EQ(disturbed.training_accuracy, 1);
    EXPECT_NEAR(disturbed.loss, undisturbed.loss, 0.15 * undisturbed.loss);
}

TEST(Trainer, CountsTheTimeOfAReplacedRankFromTheBeginOfTheRun) {
    const TemporaryDirectory temporary;
    const RecoveredRun run = train_recovering(options_for(temporary, 6, 4), true);
    EXPECT_GE(run.summary.seconds, std::chrono::duration<double>(run.until_loss).count());
}

TEST(Trainer, SaysHowManyEpochsAResumedRunHasDone) {
    const TemporaryDirectory temporary;
    train_with(1, options_for(temporary, 6, 2));
    Options more = options_for(temporary, 6, 5);
    more.resume = true;
    EXPECT_THAT(train_with(1, more).lines, Contains(HasSubstr(" % after 5 epochs, 3 of them in ")));
}

TEST(Trainer, SaysThatAWarmUpIsLongerThanTheRun) {
    const auto lines_with = [](std::uint64_t warmup) {
        const TemporaryDirectory temporary;
        Options options = options_for(temporary, 12, 1);
        options.warmup = warmup;
        return train_with(1, options).lines;
    };
    EXPECT_THAT(lines_with(999'999),
                Contains(StartsWith("train: --warmup: 999,999 steps are not fewer than the run's ")));
    EXPECT_THAT(lines_with(1), Not(Contains(HasSubstr("--warmup"))));
}

TEST(Trainer, LearnsSyntheticSamples) {
    const TemporaryDirectory temporary;
    const Outcome outcome = train_with(2, options_for(temporary, 16, 3), std::nullopt, "job1",
                                       train::make_samples({1000, 32, 10}, 5));
    EXPECT_GT(outcome.summary.held_out_accuracy, 0.95);
}

TEST(Trainer, LearnsColumnsOfVeryDifferentScales) {
    const TemporaryDirectory temporary;
    const Outcome scaled = train_with(2, options_for(temporary, 8, 20), std::nullopt, "job1", measurements());
    EXPECT_EQ(scaled.summary.held_out_accuracy, 1.0);
    Samples raw = measurements();
    raw.needs_scaling = false;
    float largest = 0;
    for (const float value : raw.values) largest = std::max(largest, value);
    for (float& value : raw.values) value /= largest;
    const TemporaryDirectory other;
    EXPECT_LT(train_with(2, options_for(other, 8, 20), std::nullopt, "job1", raw).summary.held_out_accuracy,
              0.9)
        << "without";
}

TEST(Trainer, ScalesWithTheFactorsOfTheResumedCheckpoint) {
    const TemporaryDirectory temporary;
    train_with(2, options_for(temporary, 8, 20), std::nullopt, "job1", measurements());
    Samples with_outliers = measurements();
    for (const std::size_t row : train::split_samples(with_outliers.count()).training) {
        for (std::size_t column = 0; column < 13; ++column)
            with_outliers.values[row * 13 + column] *= row % 7 == 0 ? 1000.0F : 1.0F;
    }
    Options again = options_for(temporary, 8, 20);
    again.resume = true;
    const Outcome resumed = train_with(2, again, std::nullopt, "job1", with_outliers);
    EXPECT_TRUE(resumed.summary.epochs.empty());
    EXPECT_EQ(resumed.summary.held_out_accuracy, 1.0);
}

TEST(Scaling, GivesColumnsMeanZeroAndDeviationOneOfTheTrainingRows) {
    Samples samples{"s", 2, 2, {1, 5, 3, 5, 100, 7}, {0, 1, 0}, true};
    const std::vector<std::size_t> training = {0, 1};
    train::Scaling(samples, training).apply(samples);
    EXPECT_EQ(samples.values, (std::vector<float>{-1, 0, 1, 0, 98, 0}))
        << "a constant column carries no information";
}

TEST(Trainer, LosesNoStepInManyPreemptionsInARow) {
    using enum ddp::Shard;
    // Gradients carry the request to stop, or the ranks vote.
    for (const auto& [shard, epochs, preemptions] : {std::tuple(None, 2, 20), {Optimizer, 1, 2}}) {
        const TemporaryDirectory temporary;
        Options options = options_for(temporary, 4, static_cast<std::uint64_t>(epochs));
        options.shard = shard;
        const std::string digest = train_with(2, options).summary.digest;
        options.checkpoint_dir = temporary.file("stopped");
        options.resume = true;
        std::uint64_t steps = 0;  // of rank 0, in all runs
        int stops = 0;
        train::Summary summary;
        for (summary.stopped = true; summary.stopped; ++stops) {
            ddp::testing::run_ranks(2, [&](ddp::ProcessGroup& group) {
                const train::ComputeDevice device = on_the_cpu();
                int asked = 0;
                const auto is_told = [&] { return group.rank() == stops % 2 && ++asked == 2; };
                const auto count = [&, is_first = true](std::uint64_t done) mutable {
                    if (group.rank() != 0) return false;
                    EXPECT_TRUE(!std::exchange(is_first, false) || done == steps) << "a step was lost";
                    steps = done;
                    return false;
                };
                train::Trainer trainer(group, device, options, two_clouds(), [](const std::string&) {},
                                       {is_told, count});
                trainer.resume(std::nullopt);
                train::Summary mine = trainer.run("job1");
                if (group.rank() == 0) summary = std::move(mine);
            });
        }
        EXPECT_GT(stops, preemptions) << name_of(shard);
        EXPECT_EQ(summary.digest, digest) << name_of(shard);
    }
}

TEST(Trainer, ResumesToTheSameBits) {
    const TemporaryDirectory one, two;
    const Outcome whole = train_with(2, options_for(one, 6, 4));
    train_with(2, options_for(two, 6, 2));
    Options rest = options_for(two, 6, 4);
    rest.resume = true;
    const Outcome resumed = train_with(2, rest);
    EXPECT_EQ(resumed.summary.epochs.size(), 2U);
    EXPECT_EQ(resumed.summary.digest, whole.summary.digest);
}

TEST(Trainer, KeepsItsPlaceInTheScheduleWhereFourRanksResumeTheRunOfOne) {
    const TemporaryDirectory temporary;
    Options options = options_for(temporary, 3, 4);
    options.schedule = ddp::Schedule::Shape::Linear;
    options.epochs = 2;
    const Outcome half = train_with(1, options);  // more steps than four ranks make in all four epochs
    options.epochs = 4;
    options.resume = true;
    const Outcome rest = train_with(4, options);
    EXPECT_EQ(rest.summary.epochs.size(), 2U);
    EXPECT_NE(rest.summary.digest, half.summary.digest) << "the learning rate is 0 at the schedule's end";
}

TEST(Trainer, HasTheSameBitsWithEveryShardAndResumesAnotherOne) {
    using enum ddp::Shard;
    const auto with = [](const TemporaryDirectory& directory, ddp::Shard shard, std::uint64_t epochs) {
        Options options = options_for(directory, 4, epochs);
        options.hidden = {200, 100};
        options.optimizer = train::OptimizerKind::AdamW;
        options.clip = 0.05;
        options.accumulate = 2;
        options.shard = shard;
        return options;
    };
    const TemporaryDirectory plain;
    const train::Summary whole = train_with(3, with(plain, None, 4)).summary;
    for (const auto& [first, second] :
         {std::pair(Optimizer, Gradients), {Gradients, Parameters}, {Parameters, None}}) {
        const TemporaryDirectory directory;
        const train::Summary sharded = train_with(3, with(directory, first, 2)).summary;
        Options rest = with(directory, second, 4);
        rest.resume = true;
        EXPECT_EQ(train_with(3, rest).summary.digest, whole.digest)
            << name_of(first) << ", " << name_of(second);
        EXPECT_LT(sharded.epochs[0].memory.optimizer, whole.epochs[0].memory.optimizer / 2) << name_of(first);
    }
}

TEST(Trainer, ResumesOnlyFromTheSameRunOnRequest) {
    const TemporaryDirectory temporary;
    train_with(1, options_for(temporary, 6, 2), std::nullopt, "job1");
    Options again = options_for(temporary, 6, 3);
    again.resume = true;
    EXPECT_EQ(train_with(1, again, "job2").summary.epochs.size(), 3U);
    EXPECT_EQ(train_with(1, again, "job1").summary.epochs.size(),
              0U);  // job1's last checkpoint is that of the line above: 3 epochs
}

TEST(Trainer, RefusesACheckpointOfAnotherModelOnAllRanks) {
    const TemporaryDirectory temporary;
    train_with(1, options_for(temporary, 6, 1));
    Options other = options_for(temporary, 6, 2);
    other.resume = true;
    other.hidden = {9};
    EXPECT_THROW(train_with(2, other), ddp::InvalidInput);
    other = options_for(temporary, 6, 2);
    other.resume = true;
    other.optimizer = train::OptimizerKind::AdamW;
    EXPECT_THROW(train_with(2, other), ddp::InvalidInput);
}

TEST(Trainer, SaysHowItScaledTheLearningRate) {
    const TemporaryDirectory temporary;
    Options options = options_for(temporary, 6, 1);
    options.scale_learning_rate = true;
    const std::vector<std::string> lines = train_with(2, options).lines;
    ASSERT_GT(lines.size(), 2U);
    EXPECT_NE(lines[1].find("learning rate 0.1 (0.05 x 2 workers; --no-scale-lr keeps 0.05)"),
              std::string::npos)
        << lines[1];
}

TEST(Trainer, RefusesABatchThatNoWorkerCanAccumulate) {
    Options options;
    options.batch_size = 16;
    options.accumulate = 100;
    const auto error = train::check_fit(options, two_clouds(), 2);
    ASSERT_TRUE(error);
    EXPECT_EQ(
        error->what,
        "--batch-size: 16 x --accumulate 100 is more than the 90 training samples that each of 2 workers gets");
}

TEST(Trainer, RefusesABatchThatNoWorkerCanFill) {
    Options options;
    options.batch_size = 91;
    EXPECT_TRUE(train::check_fit(options, two_clouds(), 2));
    options.batch_size = 90;
    EXPECT_FALSE(train::check_fit(options, two_clouds(), 2));
}

TEST(Agreement, EndsAllRanksWithOneLineWhenAllHaveTheSameError) {
    ddp::testing::run_ranks(3, [](ddp::ProcessGroup& group) {
        const auto agreed = train::agree(group, StartupError{ExitCode::NoInput, "x: No such file"}, {});
        ASSERT_TRUE(agreed);
        EXPECT_EQ(agreed->error.what, "x: No such file");
        EXPECT_EQ(agreed->error.code, ExitCode::NoInput);
        EXPECT_EQ(agreed->reporter, 0);
    });
}

TEST(Agreement, NamesTheOnlyRankWithAnError) {
    ddp::testing::run_ranks(3, [](ddp::ProcessGroup& group) {
        const auto agreed = train::agree(
            group, group.rank() == 2 ? std::optional(StartupError{ExitCode::DataError, "bad"}) : std::nullopt,
            {});
        ASSERT_TRUE(agreed);
        EXPECT_EQ(agreed->error.what, "rank 2: bad");
        EXPECT_EQ(agreed->reporter, 2);
    });
}

TEST(Agreement, DetectsThatARankHasReadOtherData) {
    ddp::testing::run_ranks(3, [](ddp::ProcessGroup& group) {
        Samples samples = two_clouds();
        if (group.rank() == 1) samples.values[7] += 1;
        const auto agreed = train::agree(group, std::nullopt, train::common_settings({}, samples));
        ASSERT_TRUE(agreed);
        EXPECT_EQ(agreed->error.code, ExitCode::DataError);
        EXPECT_EQ(agreed->error.what.find("--data is 200 samples of 2 values in 2 classes with hash "), 0U)
            << agreed->error.what;
        EXPECT_NE(agreed->error.what.find(" on rank 1, 200 samples"), std::string::npos)
            << agreed->error.what;
    });
    ddp::testing::run_ranks(2, [](ddp::ProcessGroup& group) {
        EXPECT_FALSE(train::agree(group, std::nullopt, train::common_settings({}, two_clouds())));
    });
}

TEST(Agreement, DetectsEveryOptionThatOnlyOneRankWasGiven) {
    const std::vector<std::vector<const char*>> alone = {
        {"--hidden", "9"}, {"--precision", "bf16"},  {"--batch-size", "3"},
        {"--epochs", "3"}, {"--optimizer", "adamw"}, {"--lr", "0.1"},
        {"--no-scale-lr"}, {"--momentum", "0.5"},    {"--weight-decay", "0"},
        {"--seed", "7"},   {"--deterministic"},      {"--cuda-graph"},
        {"--resume"},      {"--shard", "gradients"}, {"--verify-every", "4"}};
    const Samples samples = two_clouds();
    for (const std::vector<const char*>& words : alone) {
        const auto theirs = parse(words), ours = parse({});
        ASSERT_TRUE(theirs) << words[0];
        ddp::testing::run_ranks(3, [&](ddp::ProcessGroup& group) {
            const auto agreed = train::agree(
                group, std::nullopt, train::common_settings(group.rank() == 2 ? *theirs : *ours, samples));
            ASSERT_TRUE(agreed) << words[0];
            EXPECT_EQ(agreed->error.code, ExitCode::Usage);
            // --optimizer changes the learning rate too; the first difference is named.
            EXPECT_EQ(agreed->error.what.find(std::string(words[0]) + " is "), 0U) << agreed->error.what;
            EXPECT_NE(
                agreed->error.what.find(std::string(words.size() > 1 ? words[1] : "yes") + " on rank 2, "),
                std::string::npos)
                << agreed->error.what;
        });
    }
}

TEST(TrainReport, WritesNumbersForPeopleAndPrograms) {
    EXPECT_EQ(train::grouped(0), "0");
    EXPECT_EQ(train::grouped(999), "999");
    EXPECT_EQ(train::grouped(1797), "1,797");
    EXPECT_EQ(train::grouped(1234567), "1,234,567");
    EXPECT_EQ(
        train::format_epoch({3, 0.21134, 0.941, 1, 52341.9, {1 << 20, 1 << 20, 1 << 19}, 0.118, 0.034}, 30),
        "epoch  3/30  loss 0.2113  train  94.1 %  held-out 100.0 %  52,341 samples/s  memory 2.5 MiB  communication 12 %, waiting 3 %");
    EXPECT_EQ(train::format_epoch({3, 0.21134, 0.941, 1, 52341.9, {}}, 3),
              "epoch 3/3  loss 0.2113  train  94.1 %  held-out 100.0 %  52,341 samples/s  memory 0 B");
    const std::string json =
        train::to_json({4, {{1, 0.5, 0.25, 0.75, 10, {8, 4, 2}, 0.5, 0.125}}, 0.75, 1, "abc", "./c"});
    EXPECT_NE(json.find("\"parameters_sha256\": \"abc\""), std::string::npos);
    EXPECT_NE(json.find("\"loss\": 0.5"), std::string::npos);
    EXPECT_NE(json.find("\"waiting_share\": 0.125"), std::string::npos);
    EXPECT_NE(json.find("\"gradients_bytes\": 4"), std::string::npos);
}

}  // namespace
