// A complete training program: it resumes from its checkpoints, loses no step when a process is killed, stops
// in good order when it is asked to, clips gradients, lowers the learning rate and reports each epoch. The
// model is a softmax regression on 1,797 images of handwritten digits.
//
//     ddprun --nproc-per-node=4 ./digits workers/train/data run1
//
// Exits 0 when it was stopped, or ends with a mean loss below 0.75, 1 otherwise.

#include <ddp/epochs.h>

#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace {

/// Images of 8 x 8 pixels and their labels, in files of MNIST's format.
class Digits {
  public:
    explicit Digits(const std::string& directory)
        : pixels_(read(directory + "/digits-images-idx3-ubyte", 16)),
          labels_(read(directory + "/digits-labels-idx1-ubyte", 8)) {}
    [[nodiscard]] std::size_t size() const { return labels_.size(); }
    [[nodiscard]] std::size_t label(std::size_t row) const { return labels_[row]; }
    /// 64 values from 0 to 1, and a 1 for the bias.
    [[nodiscard]] std::array<float, 65> image(std::size_t row) const {
        std::array<float, 65> values{};
        for (std::size_t i = 0; i < 64; ++i) values[i] = static_cast<float>(pixels_[64 * row + i]) / 255;
        values[64] = 1;
        return values;
    }

  private:
    static std::vector<unsigned char> read(const std::string& path, std::ptrdiff_t header) {
        std::ifstream file(path, std::ios::binary);
        if (!file) throw ddp::InvalidInput(path + ": cannot be read");
        std::vector<unsigned char> bytes{std::istreambuf_iterator<char>(file), {}};
        bytes.erase(bytes.begin(), bytes.begin() + header);
        return bytes;
    }
    std::vector<unsigned char> pixels_, labels_;
};

}  // namespace

int main(int argc, char** argv) {
    return ddp::run([&](ddp::World& world) {
        const Digits data(argc > 1 ? argv[1] : "workers/train/data");
        ddp::Model model({{"weights", {10, 65}}});
        const auto optimizer = ddp::make_adamw(model, {.learning_rate = 0.1});
        ddp::EpochsOptions options{.epochs = 10, .batch_size = 16, .clip_norm = 5};
        options.schedule = {.shape = ddp::Schedule::Shape::Cosine, .warmup_steps = 20};
        options.checkpoints = argc > 2 ? argv[2] : "";
        ddp::Epochs epochs(world, model, *optimizer, data.size(), options);
        epochs.run([&](ddp::Epochs::Step& step) {
            const std::span<float> weights = model.weights<float>(0), gradient = model.gradient_as<float>(0);
            double loss = 0;
            for (const std::size_t row : step.rows()) {
                const std::array<float, 65> image = data.image(row);
                std::array<float, 10> part{};
                for (std::size_t k = 0; k < 10; ++k)
                    part[k] = std::exp(std::inner_product(image.begin(), image.end(), &weights[65 * k], 0.F));
                const float sum = std::accumulate(part.begin(), part.end(), 0.F), share = step.share();
                loss -= std::log(part[data.label(row)] / sum) * share;
                part[data.label(row)] -= sum;  // the derivative of the loss by the scores, times sum
                for (std::size_t i = 0; i < 650; ++i)
                    gradient[i] += part[i / 65] / sum * image[i % 65] * share;
            }
            step.finish(loss);
        });
        return epochs.last_report().loss > 0.75 ? 1 : 0;
    });
}
