// Compiled where cupti.h exists; a mismatch is a compile error.
#include <cupti.h>

#include "ddp/cuda/abi_check.h"
#include "tests/gpu/cupti_api.h"

namespace cupti {

#define SAME_VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
SAME_VALUE(Code::Success, CUPTI_SUCCESS);
SAME_VALUE(Domain::Driver, CUPTI_CB_DOMAIN_DRIVER_API);
SAME_VALUE(Domain::Runtime, CUPTI_CB_DOMAIN_RUNTIME_API);
SAME_VALUE(Domain::Synchronize, CUPTI_CB_DOMAIN_SYNCHRONIZE);
SAME_VALUE(Site::Enter, CUPTI_API_ENTER);
SAME_VALUE(Site::Exit, CUPTI_API_EXIT);
SAME_VALUE(kStreamSynchronized, CUPTI_CBID_SYNCHRONIZE_STREAM_SYNCHRONIZED);
SAME_VALUE(kContextSynchronized, CUPTI_CBID_SYNCHRONIZE_CONTEXT_SYNCHRONIZED);

static_assert(sizeof(CallbackData) == sizeof(CUpti_CallbackData));
#define SAME_FIELD(ours, theirs) \
    static_assert(offsetof(CallbackData, ours) == offsetof(CUpti_CallbackData, theirs))
SAME_FIELD(site, callbackSite);
SAME_FIELD(function_name, functionName);
SAME_FIELD(symbol_name, symbolName);
SAME_FIELD(correlation_id, correlationId);

#define SAME_CALL(ours, theirs) static_assert(ddp::same_call<decltype(Api::ours), decltype(&theirs)>)
SAME_CALL(subscribe, cuptiSubscribe);
SAME_CALL(enable_domain, cuptiEnableDomain);
SAME_CALL(get_result_string, cuptiGetResultString);
static_assert(ddp::same_call<Callback, CUpti_CallbackFunc>);

}  // namespace cupti
