#include "ddp/worker/bootstrap_store.h"

#include <memory>
#include <utility>

#include "ddp/worker/job_store.h"

namespace ddp {

BootstrapStore job_bootstrap_store(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline,
                                   std::string_view attempt) {
    const std::shared_ptr<ddprun::rdzv::StoreClient> client = connect_to_job_store(env, deadline);
    const auto fail = [rank = env.rank, doing = std::string(attempt)](const ddprun::Error& error) {
        throw_store_error(rank, doing, error);
    };
    BootstrapStore bootstrap;
    bootstrap.put = [client, fail](const std::string& key, const std::string& value) {
        if (const ddprun::Status set = client->set(key, value); !set) fail(set.error());
    };
    bootstrap.get = [client, fail](const std::string& key, ddprun::TimePoint until) -> std::string {
        ddprun::Result<std::string> value = client->get(key, until);
        if (value) return *std::move(value);
        if (value.error().code != ddprun::Errc::Timeout) fail(value.error());
        return "";
    };
    bootstrap.erase = [client, fail](const std::string& key) {
        if (const auto erased = client->erase(key); !erased) fail(erased.error());
    };
    return bootstrap;
}

}  // namespace ddp
