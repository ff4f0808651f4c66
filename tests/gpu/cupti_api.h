#pragma once

#include <cstdint>

/// The few calls of CUPTI's callback interface that cuda-trace.so makes, found at run time like CUDA itself.
/// cupti_abi_check.cpp compares them with cupti.h where that header is there.
namespace cupti {

struct SubscriberObject;
using Subscriber = SubscriberObject*;

enum class Code : int { Success = 0 };
enum class Domain : int { Driver = 1, Runtime = 2, Synchronize = 4 };
enum class Site : int { Enter = 0, Exit = 1 };

/// The data of callbacks of the domains Driver and Runtime.
struct CallbackData {
    Site site;
    const char* function_name;
    const void* function_params;
    void* function_return_value;
    const char* symbol_name;  ///< the kernel's mangled name; valid for launches only
    void* context;
    std::uint32_t context_uid;
    std::uint64_t* correlation_data;
    std::uint32_t correlation_id;
};

/// The data of the domain Synchronize: a wait for a stream, or for a whole context.
inline constexpr std::uint32_t kStreamSynchronized = 1, kContextSynchronized = 2;

using Callback = void (*)(void* user, Domain domain, std::uint32_t id, const void* data);

struct Api {
    Code (*subscribe)(Subscriber* subscriber, Callback callback, void* user);
    Code (*enable_domain)(std::uint32_t enable, Subscriber subscriber, Domain domain);
    Code (*get_result_string)(Code code, const char** text);
};

}  // namespace cupti
