// A GPT over bytes, trained on any text by LibTorch and libddp: each rank steps its part of the weights
// (ZeRO-1), gradients of several small batches add up, activations are recomputed where memory is short, and
// a run goes on from its newest checkpoint. gpt.py is the same model in Python.
//
//     gzip -dc < /usr/share/dictd/devil.dict.dz > devil.txt    # from Debian's dict-devil
//     ddprun --nproc-per-node=2 ./gpt devil.txt --steps 2000
//
// Exits 0 when the loss is below that of a guess at the end, 1 otherwise.

#include <ddp/checkpoint.h>
#include <ddp/context.h>
#include <ddp/optimizer.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>
#include <ddp/schedule.h>
#include <ddp/torch.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kBytes = 256, kHead = 32;  ///< the vocabulary; the width of a head of attention
constexpr std::uint64_t kSeed = 1;

constexpr const char* kHelp = R"(usage: gpt [TEXT FILE] [--option NUMBER]...
  --steps 500  --batch 12 (windows of a rank in a step)  --accumulate 1 (parts of a batch, one after the other)
  --context 64 (bytes of a window)  --width 128  --layers 4  --dropout 0
  --zero 1 (each rank steps its part of the weights; 0: all)  --recompute 0 (1: activations)
  --checkpoints DIR (the run goes on from the newest)  --save-every 100  --log-every 20  --sample 400 (bytes)
)";

struct Options {
    std::string file = "/usr/share/common-licenses/GPL-3", checkpoints;
    std::int64_t steps = 500, batch = 12, accumulate = 1, context = 64, width = 128, layers = 4, zero = 1,
                 recompute = 0, save_every = 100, log_every = 20, sample = 400;
    double dropout = 0;
};

Options read_options(std::span<char*> words) {
    Options options;
    const std::map<std::string, std::int64_t*> numbers = {{"--steps", &options.steps},
                                                          {"--batch", &options.batch},
                                                          {"--accumulate", &options.accumulate},
                                                          {"--context", &options.context},
                                                          {"--width", &options.width},
                                                          {"--layers", &options.layers},
                                                          {"--zero", &options.zero},
                                                          {"--sample", &options.sample},
                                                          {"--recompute", &options.recompute},
                                                          {"--log-every", &options.log_every},
                                                          {"--save-every", &options.save_every}};
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string name = words[i];
        if (!name.starts_with("--")) {
            options.file = name;
            continue;
        }
        std::istringstream value(++i < words.size() ? words[i] : "");
        if (name == "--checkpoints") value >> options.checkpoints;
        else if (name == "--dropout") value >> options.dropout;
        else if (numbers.contains(name)) value >> *numbers.at(name);
        else throw ddp::InvalidInput(name + ": unknown option; --help lists all");
        if (value.fail() || !value.eof())
            throw ddp::InvalidInput(name + ": '" + value.str() + "' is not a value of this option");
    }
    for (const auto& [name, number] : numbers)
        if (*number <
            (number == &options.zero || number == &options.recompute || number == &options.sample ? 0 : 1))
            throw ddp::InvalidInput(name + " " + std::to_string(*number) + ": too small");
    if (options.batch % options.accumulate != 0 || options.width % kHead != 0)
        throw ddp::InvalidInput("--batch is a multiple of --accumulate, and --width one of " +
                                std::to_string(kHead));
    return options;
}

/// Attention to the bytes up to this one, then a perceptron.
struct BlockImpl : torch::nn::Module {
    explicit BlockImpl(const Options& options) : width(options.width), dropout(options.dropout) {}

    Tensor drop(const Tensor& x) const { return torch::dropout(x, dropout, is_training()); }
    Tensor attend(const Tensor& x, const Tensor& mask) {
        const std::int64_t batch = x.size(0), length = x.size(1);
        const std::vector<Tensor> parts =
            attention(x).view({batch, length, 3, width / kHead, kHead}).permute({2, 0, 3, 1, 4}).unbind();
        const Tensor query = parts[0] / std::sqrt(static_cast<double>(kHead));
        const Tensor scores = torch::matmul(query, parts[1].transpose(2, 3)) + mask;
        const Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2]);
        return projection(mixed.transpose(1, 2).reshape({batch, length, width}));
    }
    Tensor forward(const Tensor& input, const Tensor& mask) {
        const Tensor x = input + drop(attend(norm1(input), mask));
        return x + drop(down(torch::gelu(up(norm2(x)))));
    }

    const std::int64_t width;
    const double dropout;
    const torch::nn::LayerNormOptions normalised{{width}};
    torch::nn::LayerNorm norm1 = register_module("norm1", torch::nn::LayerNorm(normalised));
    torch::nn::Linear attention = register_module("attention", torch::nn::Linear(width, 3 * width));
    torch::nn::Linear projection = register_module("projection", torch::nn::Linear(width, width));
    torch::nn::LayerNorm norm2 = register_module("norm2", torch::nn::LayerNorm(normalised));
    torch::nn::Linear up = register_module("up", torch::nn::Linear(width, 4 * width));
    torch::nn::Linear down = register_module("down", torch::nn::Linear(4 * width, width));
};

/// torch.utils.checkpoint for a block: of its activations only the input is kept, and the backward pass runs
/// the block again, with the same dropout. The weights are inputs too: their gradients leave as results of
/// this function, so each is added to .grad once, by the pass outside.
struct Recomputed : torch::autograd::Function<Recomputed> {
    static Tensor forward(AutogradContext* context, BlockImpl* block, const Tensor& x, const Tensor& mask,
                          torch::TensorList /*weights*/) {
        context->saved_data["block"] = reinterpret_cast<std::int64_t>(block);  // the model outlives the pass
        context->saved_data["random"] = at::detail::getDefaultCPUGenerator().get_state();
        context->save_for_backward({x, mask});
        return block->forward(x, mask);
    }
    static variable_list backward(AutogradContext* context, const variable_list& gradients) {
        auto& block = *reinterpret_cast<BlockImpl*>(context->saved_data["block"].toInt());
        const variable_list saved = context->get_saved_variables();
        variable_list inputs = block.parameters();
        inputs.insert(inputs.begin(), saved[0].detach().requires_grad_());
        at::Generator random = at::detail::getDefaultCPUGenerator();
        const Tensor now = random.get_state();
        random.set_state(context->saved_data["random"].toTensor());
        const torch::AutoGradMode with_gradients(true);
        const Tensor y = block.forward(inputs[0], saved[1]);
        random.set_state(now);
        variable_list results = torch::autograd::grad({y}, inputs, gradients);
        results.insert(results.begin(), Tensor());      // of the block
        results.insert(results.begin() + 2, Tensor());  // of the mask
        return results;
    }
};

struct GptImpl : torch::nn::Module {
    explicit GptImpl(const Options& how) : options(how) {
        for (std::int64_t i = 0; i < options.layers; ++i)
            blocks->push_back(std::make_shared<BlockImpl>(options));
        torch::manual_seed(kSeed);
        const torch::NoGradGuard plain;
        for (auto& parameter : named_parameters()) {
            if (parameter->dim() > 1) parameter->normal_(0, 0.02);
            else if (parameter.key().ends_with("bias")) parameter->zero_();
        }
    }
    /// The logits of the byte after each.
    Tensor forward(const Tensor& text) {
        const std::int64_t length = text.size(1);
        const Tensor mask = torch::full({length, length}, -std::numeric_limits<float>::infinity()).triu(1);
        Tensor x = embedding(text) + positions.narrow(0, 0, length);
        x = torch::dropout(x, options.dropout, is_training());
        for (std::size_t i = 0; i < blocks->size(); ++i) {
            auto& block = blocks->at<BlockImpl>(i);
            if (options.recompute != 0 && is_training()) {
                const std::vector<Tensor> weights = block.parameters();
                x = Recomputed::apply(&block, x, mask, torch::TensorList(weights));
            } else {
                x = block.forward(x, mask);
            }
        }
        return torch::nn::functional::linear(norm(x), embedding->weight);
    }

    const Options options;
    Tensor positions = register_parameter("positions", torch::empty({options.context, options.width}));
    torch::nn::Embedding embedding =
        register_module("embedding", torch::nn::Embedding(kBytes, options.width));
    torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
    torch::nn::LayerNorm norm =
        register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
};
TORCH_MODULE(Gpt);

/// The file's bytes, which are read as they are needed.
Tensor open_text(const std::string& path) {
    const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(path));
    if (bytes == 0) throw ddp::InvalidInput(path + " is empty");
    return torch::from_file(path, false, bytes, torch::kByte);
}

std::vector<std::string> names_of_vectors(const GptImpl& gpt) {
    std::vector<std::string> names;
    for (const auto& parameter : gpt.named_parameters())
        if (parameter->dim() == 1) names.push_back(parameter.key());
    return names;
}

class Run {
  public:
    Run(ddp::ProcessGroup& group, const Options& options)
        : group_(group),
          options_(options),
          text_(open_text(options.file)),
          // Windows of the text; the byte behind each is the last one to predict.
          sampler_(static_cast<std::size_t>((text_.numel() - 1) / options.context), group.size(),
                   group.rank(), {.seed = kSeed}),
          gpt_(options),
          model_(group, gpt_, {.shard = options.zero != 0 ? ddp::Shard::Optimizer : ddp::Shard::None}) {
        if (sampler_.size() < static_cast<std::size_t>(options.batch))
            throw ddp::InvalidInput(
                options.file + " has " + std::to_string(sampler_.size()) +
                " windows for each rank, less than a batch: choose a smaller --batch or --context");
    }

    /// Trains to the end; the mean loss of the last steps that were printed.
    double train() {
        std::optional<ddp::CheckpointDirectory> checkpoints;
        if (!options_.checkpoints.empty()) checkpoints.emplace(options_.checkpoints);
        if (checkpoints && checkpoints->load(group_, training_) && group_.rank() == 0)
            std::printf("goes on after step %d\n", static_cast<int>(steps()));
        const auto batch = static_cast<std::size_t>(options_.batch);
        for (; steps() < options_.steps; sampler_.next_epoch()) {
            const std::vector<std::size_t> windows = sampler_.indices();  // of the rest of the epoch
            for (std::size_t at = 0; at + batch <= windows.size() && steps() < options_.steps; at += batch) {
                sampler_.advance(batch);
                step(std::span(windows).subspan(at, batch));
                if (checkpoints && is_due(options_.save_every)) checkpoints->save(group_, training_);
            }
        }
        return last_loss_;
    }

    /// Continues a new line, byte by byte.
    std::string sample() {
        const torch::NoGradGuard plain;
        torch::manual_seed(kSeed);
        gpt_->eval();
        Tensor known = torch::full({1, 1}, std::int64_t{'\n'});
        for (std::int64_t i = 0; i < options_.sample; ++i) {
            const std::int64_t length = std::min(known.size(1), options_.context);
            const Tensor logits = gpt_(known.narrow(1, known.size(1) - length, length))[0][-1] / 0.8;
            known = torch::cat({known, torch::multinomial(torch::softmax(logits, 0), 1).unsqueeze(0)}, 1);
        }
        const Tensor bytes = known.to(torch::kByte);
        return {static_cast<const char*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
    }
    std::string digest() { return model_.verify_equal_parameters(); }

  private:
    [[nodiscard]] std::int64_t steps() const { return static_cast<std::int64_t>(optimizer_->steps()); }

    [[nodiscard]] bool is_due(std::int64_t every) const {
        return steps() % every == 0 || steps() == options_.steps;
    }

    /// The bytes of these windows, [batch, context + 1].
    [[nodiscard]] Tensor bytes_of(std::span<const std::size_t> windows) const {
        std::vector<Tensor> rows;
        for (const std::size_t window : windows)
            rows.push_back(
                text_.narrow(0, static_cast<std::int64_t>(window) * options_.context, options_.context + 1));
        return torch::stack(rows).to(torch::kLong);
    }

    void step(std::span<const std::size_t> windows) {
        // The dropout of each step and rank is its own, also after a restart.
        torch::manual_seed(kSeed + 1 + static_cast<std::uint64_t>(steps() * group_.size() + group_.rank()));
        const std::vector<Tensor> parts = bytes_of(windows).chunk(options_.accumulate);
        model_.zero_grad();
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const auto accumulating = model_.no_sync(i + 1 < parts.size());
            const Tensor logits = model_(parts[i].narrow(1, 0, options_.context));
            const Tensor next = parts[i].narrow(1, 1, options_.context).reshape(-1);
            const Tensor loss =
                torch::nn::functional::cross_entropy(logits.view({-1, kBytes}), next) / options_.accumulate;
            loss.backward();
            loss_sum_ += loss.item<double>();
        }
        ddp::clip_grad_norm(model_, 1.0);
        optimizer_->step();
        rate_.step();
        ++unprinted_;
        if (is_due(options_.log_every)) print();
    }

    void print() {
        group_.all_reduce(ddp::buffer_of(std::span(&loss_sum_, 1)), ddp::ReduceOp::Avg).wait();
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - std::exchange(since_, now)).count();
        const std::int64_t count = std::exchange(unprinted_, 0),
                           tokens = options_.batch * options_.context * group_.size();
        last_loss_ = std::exchange(loss_sum_, 0) / static_cast<double>(count);
        if (group_.rank() == 0)
            std::printf("step %d: loss %.6f, %.0f tokens/s\n", static_cast<int>(steps()), last_loss_,
                        static_cast<double>(count * tokens) / seconds);
        std::fflush(stdout);
    }

    ddp::ProcessGroup& group_;
    const Options& options_;
    const Tensor text_;
    ddp::DistributedSampler sampler_;
    Gpt gpt_;
    ddp::pytorch::DistributedDataParallel<GptImpl> model_;
    std::unique_ptr<ddp::Optimizer> optimizer_ =
        ddp::make_adamw(model_, {.learning_rate = 1e-3,
                                 .beta2 = 0.95,
                                 .weight_decay = 0.1,
                                 .groups = {{.parameters = names_of_vectors(*gpt_), .weight_decay = 0.0}}});
    ddp::ScheduledRate rate_{*optimizer_,
                             {.shape = ddp::Schedule::Shape::Cosine,
                              .warmup_steps = static_cast<std::uint64_t>(options_.steps / 20),
                              .total_steps = static_cast<std::uint64_t>(options_.steps)}};
    const ddp::Training training_{model_, *optimizer_, sampler_, {{"schedule", &rate_}}};
    std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
    double loss_sum_ = 0, last_loss_ = 0;
    std::int64_t unprinted_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
    if (argc > 1 && std::string(argv[1]) == "--help") return std::fputs(kHelp, stdout) < 0 ? 1 : 0;
    // The allocator gives freed memory back to the kernel, which would clear pages for each step's
    // activations.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, -1);
    const Options options = read_options({argv + 1, static_cast<std::size_t>(argc - 1)});
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env());
    Run run(*group, options);
    const double loss = run.train();
    const std::string digest = run.digest();
    if (group->rank() == 0)
        std::printf("%s\n%d workers, sha256 %s\n", run.sample().c_str(), group->size(), digest.c_str());
    return loss < std::log(static_cast<double>(kBytes)) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
}
