#include "ddp/store.h"

#include <fmt/core.h>

#include <utility>

#include "ddp/types.h"
#include "ddp/worker/fork.h"
#include "ddp/worker/job_store.h"
#include "env/text.h"

namespace ddp {

using ddprun::deadline_after;
using ddprun::MonotonicClock;
using ddprun::Result;
using ddprun::Status;
using ddprun::rdzv::StoreClient;

namespace {

constexpr std::size_t kMostKeyBytes = 1000;  ///< below the server's limit with the prefix of own()
constexpr std::size_t kShownKeyBytes = 200;

/// Users' keys have a prefix of their own: libddp's keys begin with other words.
std::string own(std::string_view key) { return fmt::format("user/{}", key); }

}  // namespace

struct Store::Impl {
    int rank;
    int world_size;
    Timeout timeout;
    std::shared_ptr<StoreClient> client;
    std::uint32_t made_in = fork_count();

    [[noreturn]] void fail(std::string_view operation, std::string_view key,
                           const ddprun::Error& error) const {
        throw_store_error(
            rank, fmt::format("Store::{}(\"{}\")", operation, ddprun::excerpt(key, kShownKeyBytes)), error);
    }
    template <class T>
    T checked(Result<T> result, std::string_view operation, std::string_view key) const {
        if (!result) fail(operation, key, result.error());
        return *std::move(result);
    }
    void checked(const Status& status, std::string_view operation, std::string_view key) const {
        if (!status) fail(operation, key, status.error());
    }
    void check_key(std::string_view key) const {
        require_same_process(made_in, fmt::format("rank {}: the store", rank));
        if (key.empty()) throw InvalidInput("a key of the store must not be empty");
        if (key.size() > kMostKeyBytes) {
            throw InvalidInput(fmt::format("a key of the store has at most {} bytes; \"{}\" has {}",
                                           kMostKeyBytes, ddprun::excerpt(key), key.size()));
        }
    }
};

Store::Store(const Context& context, Timeout timeout)
    : impl_(std::make_unique<Impl>(
          context.rank(), context.world_size(), timeout,
          connect_to_job_store(context.env(), deadline_after(MonotonicClock::now(), timeout)))) {
    impl_->client->set_operation_timeout(timeout);
}
Store::~Store() = default;
Store::Store(Store&&) noexcept = default;
Store& Store::operator=(Store&&) noexcept = default;

void Store::set(std::string_view key, std::string_view value) {
    impl_->check_key(key);
    impl_->checked(impl_->client->set(own(key), value), "set", key);
}

std::string Store::get(std::string_view key) { return get(key, impl_->timeout); }
std::string Store::get(std::string_view key, Timeout timeout) {
    impl_->check_key(key);
    return impl_->checked(impl_->client->get(own(key), deadline_after(MonotonicClock::now(), timeout)), "get",
                          key);
}

std::optional<std::string> Store::try_get(std::string_view key) {
    impl_->check_key(key);
    return impl_->checked(impl_->client->try_get(own(key)), "try_get", key);
}

std::int64_t Store::add(std::string_view key, std::int64_t delta) {
    impl_->check_key(key);
    return impl_->checked(impl_->client->add(own(key), delta), "add", key);
}

Store::Exchange Store::compare_set(std::string_view key, std::optional<std::string_view> expected,
                                   std::string_view desired) {
    impl_->check_key(key);
    StoreClient::Exchange done =
        impl_->checked(impl_->client->compare_set(own(key), expected, desired), "compare_set", key);
    return {done.swapped, std::move(done.value)};
}

bool Store::erase(std::string_view key) {
    impl_->check_key(key);
    return impl_->checked(impl_->client->erase(own(key)), "erase", key);
}

void Store::wait(const std::vector<std::string>& keys) { wait(keys, impl_->timeout); }
void Store::wait(const std::vector<std::string>& keys, Timeout timeout) {
    if (keys.empty()) return;
    std::vector<std::string> named;
    for (const std::string& key : keys) {
        impl_->check_key(key);
        named.push_back(own(key));
    }
    impl_->checked(impl_->client->wait(named, deadline_after(MonotonicClock::now(), timeout)), "wait",
                   keys.front());
}

void Store::barrier(std::string_view name) { barrier(name, impl_->world_size, impl_->timeout); }
void Store::barrier(std::string_view name, int participants, Timeout timeout) {
    impl_->check_key(name);
    impl_->checked(
        impl_->client->barrier(own(name), participants, deadline_after(MonotonicClock::now(), timeout)),
        "barrier", name);
}

}  // namespace ddp
