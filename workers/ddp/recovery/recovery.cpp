#include "ddp/recovery.h"

#include <utility>

#include "ddp/checkpoint.h"

namespace ddp {

class Recovery::Impl {
  public:
    Context context;
    ProcessGroupOptions options;
    std::uint64_t commits = 0;
};

Recovery::Recovery(const Context& context, ProcessGroupOptions options, Lifeline* /*lifeline*/)
    : impl_(std::make_unique<Impl>(context, std::move(options))) {}
Recovery::~Recovery() = default;

void Recovery::keep(const Training&) {}
void Recovery::keep(std::string, Stateful&, Kind) {}
void Recovery::keep(std::string, std::vector<Tensor>, Kind) {}
void Recovery::keep_bytes(std::string, void*, std::size_t, Kind) {}
void Recovery::keep_text(std::string, std::function<std::string()>, std::function<void(const std::string&)>,
                         Kind) {}

void Recovery::run(const std::function<void(ProcessGroup&, const Start&)>& body) {
    const auto group = ProcessGroup::create(impl_->context, impl_->options);
    body(*group, {.generation = impl_->context.generation()});
}

void Recovery::prepare() {}
void Recovery::commit(const std::function<void()>& change) {
    if (change) change();
    ++impl_->commits;
}
std::uint64_t Recovery::commits() const { return impl_->commits; }

std::uint64_t step_seed(std::uint64_t seed, int rank, std::uint64_t commits) {
    // splitmix64 of each number in turn, so that neighbours give unrelated seeds.
    std::uint64_t mixed = seed;
    for (const std::uint64_t number : {static_cast<std::uint64_t>(rank), commits}) {
        mixed += (number + 1) * 0x9e3779b97f4a7c15;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
        mixed ^= mixed >> 31;
    }
    return mixed;
}

}  // namespace ddp
