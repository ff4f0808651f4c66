#include "ddp/run.h"

#include <errno.h>  // program_invocation_short_name

#include "ddp/error_report.h"

namespace ddp {

World::World(Context context, ProcessGroupOptions options)
    : context_(std::move(context)), options_(std::move(options)) {}

World::~World() = default;

ProcessGroup& World::group() {
    if (group_ == nullptr) {
        own_group_ = ProcessGroup::create(context_, options_);
        group_ = own_group_.get();
    }
    return *group_;
}

Lifeline& World::lifeline() {
    if (!lifeline_) lifeline_ = std::make_unique<Lifeline>(context_);
    return *lifeline_;
}

int run(const std::function<int(World&)>& body, ProcessGroupOptions options) {
    return run_main(program_invocation_short_name, [&] {
        World world(Context::from_env(), std::move(options));
        const int code = body(world);
        return code == 0 && world.stopped_early() ? kStoppedEarly : code;
    });
}

}  // namespace ddp
