// One rank of a training of a small module, the same as torch_ranks.py's:
//   torch_ranks DIRECTORY [resume|recover] [STEP]
// Writes "STEP LOSS" lines to DIRECTORY/losses.RANK, and with `resume` a checkpoint every 50 steps, which a
// later start continues. The last rank kills itself in STEP, once.
#include <ddp/checkpoint.h>
#include <ddp/torch.h>
#include <signal.h>
#include <torch/nn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

namespace {

constexpr std::uint64_t kSteps = 200, kSaveEvery = 50;

/// Uses the weight of another layer, transposed or not as that does.
struct Tied : torch::nn::Module {
    explicit Tied(const torch::Tensor& shared) { weight = register_parameter("weight", shared); }
    torch::Tensor forward(const torch::Tensor& x) { return torch::nn::functional::linear(x, weight); }
    torch::Tensor weight;
};

struct NetImpl : torch::nn::Module {
    torch::nn::Linear encoder = register_module("encoder", torch::nn::Linear(16, 16));
    torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(16));
    torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.25));
    std::shared_ptr<Tied> decoder = register_module("decoder", std::make_shared<Tied>(encoder->weight));

    NetImpl() {
        const torch::NoGradGuard plain;
        for (auto& one : {encoder->weight, encoder->bias})
            one.copy_((torch::arange(one.numel(), torch::kFloat) * 1.7).sin().reshape(one.sizes()) * 0.3);
    }
    torch::Tensor forward(const torch::Tensor& x) {
        return decoder->forward(dropout(torch::relu(norm(encoder(x)))));
    }
};
TORCH_MODULE(Net);

struct Run {
    explicit Run(const ddp::Context& its_context, const char* const* arguments)
        : context(its_context),
          directory(arguments[1]),
          mode(arguments[2] != nullptr ? arguments[2] : ""),
          last(mode.empty() || arguments[3] == nullptr ? kSteps : std::strtoull(arguments[3], nullptr, 10)),
          sampler(1000, context.world_size(), context.rank()) {}

    [[nodiscard]] std::string path_of(const char* name) const {
        return directory + "/" + name + std::to_string(context.rank());
    }
    void record(double loss) const {
        std::FILE* const file = std::fopen(path_of("losses.").c_str(), "a");
        std::fprintf(file, "%llu %.9g\n", static_cast<unsigned long long>(optimizer.steps()), loss);
        std::fclose(file);
    }
    /// In `step`, once, in the last rank.
    void may_die(std::uint64_t step) const {
        if (step != last || context.rank() + 1 != context.world_size()) return;
        if (::access(path_of("died.").c_str(), F_OK) == 0) return;
        std::fclose(std::fopen(path_of("died.").c_str(), "w"));
        ::kill(::getpid(), SIGKILL);
    }
    torch::Tensor backward() {
        torch::manual_seed(64 * optimizer.steps() + static_cast<std::uint64_t>(context.rank()));
        const torch::Tensor x = torch::randn({8, 16});
        sgd.zero_grad();
        torch::Tensor loss = torch::nn::functional::mse_loss(model(x), x);
        may_die(optimizer.steps());
        loss.backward();
        return loss;
    }
    void train() {
        const auto group = ddp::ProcessGroup::create(context);
        model.attach(*group);
        ddp::CheckpointDirectory checkpoints(directory + "/checkpoints");
        const ddp::Training training{model, optimizer, sampler.position()};
        if (mode == "resume") checkpoints.load(*group, training);
        while (optimizer.steps() < kSteps) {
            record(backward().item<double>());
            optimizer.step();
            if (mode == "resume" && optimizer.steps() % kSaveEvery == 0) checkpoints.save(*group, training);
        }
        model.verify_equal_parameters();
    }
    void recover() {
        ddp::Recovery recovery(context);
        model.keep_in(recovery);
        recovery.keep("optimizer", optimizer);
        recovery.run([&](ddp::ProcessGroup& group, const ddp::Start& start) {
            model.attach(group, start.is_new());
            while (optimizer.steps() < kSteps) {
                const torch::Tensor loss = backward();
                recovery.commit([&] { record(loss.item<double>()), optimizer.step(); });
            }
            model.verify_equal_parameters();
        });
    }

    const ddp::Context& context;
    const std::string directory, mode;
    const std::uint64_t last;  ///< step in which a rank dies
    Net net;
    ddp::pytorch::DistributedDataParallel<NetImpl> model{net};
    torch::optim::SGD sgd{model.torch_parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
    ddp::pytorch::Optimizer optimizer{model, sgd};
    ddp::pytorch::DistributedSampler sampler;
};

}  // namespace

int main(int argc, char** argv) try {
    at::set_num_threads(1);
    if (argc < 2) return 64;
    const ddp::Context context = ddp::Context::from_env();
    Run run(context, argv);
    run.mode == "recover" ? run.recover() : run.train();
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "torch_ranks: %s\n", error.what());
    return 1;
}
