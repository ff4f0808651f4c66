#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

/// Images of one channel with labels, from MNIST's files: "NAME-images-idx3-ubyte", "NAME-labels-idx1-ubyte".
class IdxImages : public torch::data::datasets::Dataset<IdxImages> {
  public:
    enum class Part : std::uint8_t { Training, HeldOut };  ///< nine tenths, and the last tenth
    /// Throws std::runtime_error naming a file that cannot be read.
    IdxImages(const std::string& directory, Part part) {
        std::string name = directory + "/train";
        if (!std::ifstream(name + "-images-idx3-ubyte")) name = directory + "/digits";
        const torch::Tensor images = read(name + "-images-idx3-ubyte", 3).unsqueeze(1).to(torch::kFloat);
        const torch::Tensor labels = read(name + "-labels-idx1-ubyte", 1).to(torch::kLong);
        const std::int64_t all = labels.size(0), held_out = all / 10;
        const bool trains = part == Part::Training;
        images_ =
            (images / images.max()).slice(0, trains ? 0 : all - held_out, trains ? all - held_out : all);
        labels_ = labels.slice(0, trains ? 0 : all - held_out, trains ? all - held_out : all);
    }
    torch::data::Example<> get(std::size_t index) override {
        const auto i = static_cast<std::int64_t>(index);
        return {images_[i], labels_[i]};
    }
    [[nodiscard]] torch::optional<std::size_t> size() const override {
        return static_cast<std::size_t>(labels_.size(0));
    }
    [[nodiscard]] const torch::Tensor& images() const { return images_; }
    [[nodiscard]] const torch::Tensor& labels() const { return labels_; }

  private:
    /// The header: 0, 0, 8 (bytes), the number of dimensions, and each extent in 32 bits, big-endian.
    static torch::Tensor read(const std::string& path, unsigned dimensions) {
        std::ifstream file(path, std::ios::binary);
        const auto number = [&file] {
            std::uint32_t value = 0;
            for (int byte = 0; byte < 4; ++byte) value = value << 8 | static_cast<std::uint32_t>(file.get());
            return value;
        };
        if (number() != (8U << 8 | dimensions))
            throw std::runtime_error(path + ": not a file of images or labels");
        std::vector<std::int64_t> shape;
        for (unsigned i = 0; i < dimensions; ++i) shape.push_back(number());
        torch::Tensor values = torch::empty(shape, torch::kByte);
        file.read(static_cast<char*>(values.data_ptr()), values.numel());
        if (!file) throw std::runtime_error(path + ": ends too early");
        return values;
    }

    torch::Tensor images_, labels_;
};

/// A small convolutional network that reads them.
struct NetImpl : torch::nn::Module {
    torch::nn::Conv2d first = register_module("first", torch::nn::Conv2d(1, 16, 3));
    torch::nn::Conv2d second = register_module("second", torch::nn::Conv2d(16, 32, 3));
    torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(32 * 4 * 4, 64));
    torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.25));
    torch::nn::Linear output = register_module("output", torch::nn::Linear(64, 10));

    torch::Tensor forward(torch::Tensor x) {
        x = torch::relu(second(torch::relu(first(x))));
        x = torch::adaptive_avg_pool2d(x, {4, 4}).flatten(1);
        return output(dropout(torch::relu(hidden(x))));
    }
};
TORCH_MODULE(Net);

/// The part of the images that the network reads right.
inline double right_part(Net& net, const IdxImages& digits) {
    const torch::NoGradGuard plain;
    net->eval();
    const torch::Tensor right = net(digits.images()).argmax(1) == digits.labels();
    return right.to(torch::kDouble).mean().item<double>();
}
