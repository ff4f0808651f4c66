// A training run of a few parameters under ddp::Recovery that fails as told, for campaign.cpp:
//   recovering FAULT UNIT
// The faults happen once, in unit UNIT, on the rank or ranks that the fault names. Rank 0 prints the digest
// of the weights and the running sum of every rank's own values, with which it ends.
#include <fmt/core.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <bit>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ddp/context.h"
#include "ddp/error_report.h"
#include "ddp/model.h"
#include "ddp/objects.h"
#include "ddp/recovery.h"

namespace {

constexpr std::uint64_t kUnits = 40;

/// Kept state that calls back when another rank has given it.
class Received final : public ddp::Stateful {
  public:
    explicit Received(std::function<void()> then) : then_(std::move(then)) {}
    [[nodiscard]] std::vector<ddp::Tensor> state() const override {
        return {ddp::tensor_of("padding", padding_, {static_cast<std::int64_t>(padding_.size())})};
    }
    void state_loaded() override { then_(); }

  private:
    mutable std::vector<float> padding_ = std::vector<float>(1 << 18);
    std::function<void()> then_;
};

/// A kept value that calls back when another rank needs it.
struct Told {
    std::function<void()> when;
    friend void to_json(nlohmann::json& json, const Told& told) {
        if (told.when) told.when();
        json = 0;
    }
    friend void from_json(const nlohmann::json&, Told&) {}
};

[[noreturn]] void spin() {
    for (volatile int n = 0;;) n = n + 1;
}

class Run {
  public:
    Run(const ddp::Context& context, std::string fault, std::uint64_t unit)
        : fault_(std::move(fault)),
          unit_(unit),
          recovery_(context, {.backend = "cpu"}),
          received_([this] {
              if (fault_ == "in transfer" && generation() == 2) kill_self();
          }),
          rng_(static_cast<unsigned>(context.rank())) {
        for (std::size_t i = 0; i < 2; ++i) {
            for (float& w : model_.weights<float>(i)) w = static_cast<float>(i) + 0.5F;
        }
        recovery_.keep("model", model_);
        recovery_.keep("optimizer", *optimizer_);
        recovery_.keep("received", received_);
        recovery_.keep_value("told", told_);
        recovery_.keep_value("units", units_);
        recovery_.keep_value("noise", noise_, ddp::Recovery::Kind::Own);
        if (fault_ != "unkept") recovery_.keep_value("rng", rng_, ddp::Recovery::Kind::Own);
    }

    void run() {
        recovery_.run([this](ddp::ProcessGroup& group, const ddp::Start& start) { train(group, start); });
    }

  private:
    [[noreturn]] static void kill_self() {
        ::kill(::getpid(), SIGKILL);
        std::abort();
    }
    [[nodiscard]] std::uint64_t generation() const { return recovery_.context().generation(); }
    /// The failure of a rank, the last one, in unit `unit_` of the first generation.
    [[nodiscard]] bool is_due(const ddp::ProcessGroup& group) const {
        return generation() == 1 && units_ == unit_ && group.rank() == group.size() - 1;
    }
    /// Ends this process within a moment.
    static void kill_self_soon(unsigned microseconds) {
        std::thread([microseconds] {
            ::usleep(static_cast<unsigned>(::getpid()) * 7919 % microseconds), kill_self();
        }).detach();
    }
    void fail_where(const char* place, bool is_due) const {
        if (is_due && fault_ == place) kill_self();
    }

    /// Ends a survivor that leaves the body after another rank was lost: at once, or soon afterwards.
    struct SecondFailure {
        ~SecondFailure() {
            if (std::uncaught_exceptions() == before) return;
            if (at_once) kill_self();
            if (soon) kill_self_soon(30'000);
        }
        bool at_once, soon;
        int before = std::uncaught_exceptions();
    };

    void train(ddp::ProcessGroup& group, const ddp::Start& start) {
        const bool is_second = generation() == 1 && group.rank() == 1;
        const SecondFailure second{is_second && fault_ == "in let go", is_second && fault_ == "in join"};
        model_.attach(group, start.is_new());
        while (units_ < kUnits) unit(group);
        if (is_verified_) model_.verify_by_majority();
        std::vector<double> sum = {noise_};
        group.all_reduce(ddp::buffer_of(sum)).wait();
        const std::string digest = model_.verify_equal_parameters();
        if (group.rank() == 0) fmt::print("digest {} {:a}\n", digest, sum[0]), std::fflush(stdout);
    }

    void unit(ddp::ProcessGroup& group) {
        const bool due = is_due(group);
        const auto draw = static_cast<float>(std::uniform_real_distribution<double>(-1, 1)(rng_));
        noise_ += static_cast<double>(draw);
        recovery_.prepare();
        if (fault_ == "unkept") ::usleep(2000);  // time for a rehearsal
        std::thread killer;
        if (due && fault_ == "in all-reduce")
            killer = std::thread([] { ::usleep(static_cast<unsigned>(::getpid()) % 300), kill_self(); });
        for (std::size_t i = 2; i-- > 0;) {
            const auto gradient = model_.gradient_as<float>(i), weights = model_.weights<float>(i);
            for (std::size_t e = 0; e < gradient.size(); ++e)
                gradient[e] = weights[e] - draw * static_cast<float>(e % 7);
            model_.mark_ready(i);
        }
        model_.finish();
        if (killer.joinable()) killer.join();
        fail_where("between reduce and commit", due);
        if (due) fail_otherwise();
        const bool half = generation() == 1 && units_ == unit_ && 2 * group.rank() >= group.size();
        fail_where("half of the ranks", half);
        const bool all = generation() == 1 && units_ == unit_;
        fail_where("most of the ranks", all && group.rank() > 0);
        if (all && fault_ == "SIGSTOP of all ranks") ::raise(SIGSTOP);
        fail_where("deaf", all && group.rank() == 1);
        recovery_.commit([&] {
            optimizer_->step();
            fail_where("in commit", due);
            ++units_;
        });
    }

    void fail_otherwise() const {
        for (const char* const first : {"in let go", "in join", "in transfer", "source in transfer"}) {
            if (fault_ == first) kill_self();
        }
        if (fault_ == "exit 1") std::_Exit(1);
        if (fault_ == "throw") throw std::runtime_error("as told");
        if (fault_ == "abort()") std::abort();
        if (fault_ == "SIGSTOP") ::raise(SIGSTOP);
        if (fault_ == "out of memory") use_all_memory();
        if (fault_ == "busy loop" || fault_ == "deaf") spin();
        if (fault_ == "hang in atexit") {
            std::atexit([] { ::pause(); });
            ddp::write_error_report("as told");
            std::exit(1);
        }
        if (fault_.starts_with("bit flip")) {
            float& weight = model_.weights<float>(0)[7];
            weight = std::bit_cast<float>(std::bit_cast<std::uint32_t>(weight) ^ 1U << 20U);
        }
    }

    /// Under a limit on the address space, as `ulimit -v` sets it.
    [[noreturn]] static void use_all_memory() {
        std::size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        const rlim_t most = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20U);
        const rlimit limit{most, most};
        ::setrlimit(RLIMIT_AS, &limit);
        std::vector<std::vector<char>> all;
        for (;;) all.emplace_back(1 << 20, 'x');
    }

    std::string fault_;
    std::uint64_t unit_;
    ddp::Recovery recovery_;
    const bool is_verified_ = fault_ == "bit flip, verified";
    ddp::Model model_{{{"a", {3000}}, {"b", {70}}}, {.verify_every = is_verified_ ? 1U : 0U}};
    std::unique_ptr<ddp::Optimizer> optimizer_ = ddp::make_adamw(model_, {.learning_rate = 0.01});
    Received received_;
    Told told_{[this] {
        if (fault_ == "source in transfer" && generation() == 2) kill_self_soon(1000);
    }};
    std::uint64_t units_ = 0;
    double noise_ = 0;
    std::mt19937_64 rng_;
};

}  // namespace

int main(int argc, char** argv) {
    return ddp::run_main("recovering", [&] {
        if (argc != 3) throw std::runtime_error("expected FAULT UNIT");
        Run(ddp::Context::from_env(), argv[1], std::strtoull(argv[2], nullptr, 10)).run();
        return 0;
    });
}
