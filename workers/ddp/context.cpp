#include "ddp/context.h"

#include "ddp/launcher_context.h"
#include "ddp/types.h"

namespace ddp {

Context Context::from_env() {
    ddprun::Result<LauncherContext> found = read_launcher(ddprun::process_environment);
    if (!found) throw InvalidInput("reading the worker's environment: " + found.error().what);
    return Context(std::move(found->env), std::move(found->origin));
}

}  // namespace ddp
