// Stands for libcupti: one subscriber, whose callback hears of the calls that a test plays. As strict as
// CUPTI: a second subscriber and unknown domains are refused, and only domains that were enabled are heard
// of.
//
// FAKE_CUPTI_REFUSES=1  cuptiSubscribe fails, as when another tool traces already
//
// void fake_cupti_play(domain, site, function, symbol)  one callback, on the calling thread
// void fake_cupti_synchronized(id)                      one callback of the domain Synchronize
#include <cstdlib>
#include <set>

#include "tests/gpu/cupti_api.h"

namespace {

constexpr auto kInvalidParameter = static_cast<cupti::Code>(1);
constexpr auto kMultipleSubscribers = static_cast<cupti::Code>(39);

struct State {
    cupti::Callback callback = nullptr;
    void* user = nullptr;
    std::set<cupti::Domain> enabled;
};
State& state() {
    static auto* const only = new State;
    return *only;
}

}  // namespace

extern "C" {

cupti::Code cuptiSubscribe(cupti::Subscriber* subscriber, cupti::Callback callback, void* user) {
    if (state().callback != nullptr || std::getenv("FAKE_CUPTI_REFUSES") != nullptr)
        return kMultipleSubscribers;
    state().callback = callback;
    state().user = user;
    *subscriber = reinterpret_cast<cupti::Subscriber>(&state());
    return cupti::Code::Success;
}

cupti::Code cuptiEnableDomain(unsigned enable, cupti::Subscriber subscriber, cupti::Domain domain) {
    if (reinterpret_cast<State*>(subscriber) != &state() || static_cast<int>(domain) < 1 ||
        static_cast<int>(domain) > 6)
        return kInvalidParameter;
    if (enable != 0) state().enabled.insert(domain);
    else state().enabled.erase(domain);
    return cupti::Code::Success;
}

cupti::Code cuptiGetResultString(cupti::Code code, const char** text) {
    *text = code == kMultipleSubscribers ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
                                         : "CUPTI_ERROR_INVALID_PARAMETER";
    return cupti::Code::Success;
}

void fake_cupti_play(cupti::Domain domain, cupti::Site site, const char* function, const char* symbol) {
    if (!state().enabled.contains(domain)) return;
    // Only launches have a symbol: elsewhere whoever reads it reads what is not there.
    const auto* const no_symbol = reinterpret_cast<const char*>(1);
    const cupti::CallbackData data{.site = site,
                                   .function_name = function,
                                   .function_params = nullptr,
                                   .function_return_value = nullptr,
                                   .symbol_name = symbol != nullptr ? symbol : no_symbol,
                                   .context = nullptr,
                                   .context_uid = 1,
                                   .correlation_data = nullptr,
                                   .correlation_id = 1};
    state().callback(state().user, domain, 1, &data);
}

void fake_cupti_synchronized(unsigned id) {
    if (state().enabled.contains(cupti::Domain::Synchronize))
        state().callback(state().user, cupti::Domain::Synchronize, id, nullptr);
}

}  // extern "C"
