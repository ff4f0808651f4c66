#include "launcher/node/pmix/library.h"

#ifdef DDPRUN_HAVE_PMIX

#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "env/io/library.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun {

Result<PmixLibrary> load_pmix(const std::string& file) {
    const std::string name = file.empty() ? "libpmix.so.2" : file;
    void* const handle = load_library(name.c_str());
    if (handle == nullptr) return Error{Errc::NotFound, ::dlerror(), 0};
    PmixLibrary library;
    const bool whole = find_function(handle, "PMIx_server_init", library.init) &&
                       find_function(handle, "PMIx_server_finalize", library.finalize) &&
                       find_function(handle, "PMIx_server_register_nspace", library.register_nspace) &&
                       find_function(handle, "PMIx_server_deregister_nspace", library.deregister_nspace) &&
                       find_function(handle, "PMIx_server_register_client", library.register_client) &&
                       find_function(handle, "PMIx_server_setup_fork", library.setup_fork) &&
                       find_function(handle, "PMIx_server_dmodex_request", library.dmodex_request) &&
                       find_function(handle, "PMIx_Error_string", library.error_string);
    if (!whole) return Error{Errc::NotFound, fmt::format("{} lacks functions of a PMIx server", name), 0};
    return library;
}

Upcalls& Upcalls::instance() {
    static Upcalls* const only = new Upcalls;
    return *only;
}

void Upcalls::wake_by(int eventfd) {
    const std::lock_guard guard(mutex_);
    eventfd_ = eventfd;
    posted_.clear();
}

void Upcalls::post(Upcall upcall) {
    const std::lock_guard guard(mutex_);
    if (eventfd_ < 0) return;
    posted_.push_back(std::move(upcall));
    const std::uint64_t one = 1;
    (void)!::write(eventfd_, &one, sizeof one);
}

std::vector<Upcall> Upcalls::take() {
    const std::lock_guard guard(mutex_);
    return std::exchange(posted_, {});
}

namespace {

void post(Upcall upcall) { Upcalls::instance().post(std::move(upcall)); }

// The following functions neither wait for the loop nor throw.

pmix_status_t on_client_connected(const pmix_proc_t* proc, void*, pmix_op_cbfunc_t, void*) {
    post(ClientConnected{proc->nspace, proc->rank});
    return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t on_client_finalized(const pmix_proc_t* proc, void*, pmix_op_cbfunc_t, void*) {
    post(ClientFinalized{proc->nspace, proc->rank});
    return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t on_abort(const pmix_proc_t* proc, void*, int status, const char text[], pmix_proc_t[],
                       std::size_t, pmix_op_cbfunc_t, void*) {
    post(ClientAborted{proc->nspace, proc->rank, status, text == nullptr ? "" : text});
    return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t on_fence(const pmix_proc_t procs[], std::size_t count, const pmix_info_t infos[],
                       std::size_t info_count, char* data, std::size_t size, pmix_modex_cbfunc_t answer,
                       void* cookie) {
    FenceCalled fence{procs[0].nspace, {}, true, {}, {answer, cookie}};
    for (std::size_t i = 0; i < info_count; ++i) {
        const bool is_status =
            std::strncmp(infos[i].key, PMIX_LOCAL_COLLECTIVE_STATUS, sizeof infos[i].key) == 0;
        if (is_status && infos[i].value.data.status != PMIX_SUCCESS) fence.is_whole = false;
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (fence.name_space != procs[i].nspace) return PMIX_ERR_NOT_SUPPORTED;  // two jobs
        fence.ranks.push_back(procs[i].rank);
    }
    // One byte above the limit tells the head that the part is too large.
    if (data != nullptr)
        fence.data = rdzv::Blob(std::string(data, std::min(size, rdzv::kFencePartBytes + 1)));
    post(std::move(fence));
    return PMIX_SUCCESS;
}

pmix_status_t on_direct_modex(const pmix_proc_t* proc, const pmix_info_t[], std::size_t,
                              pmix_modex_cbfunc_t answer, void* cookie) {
    post(ModexCalled{proc->nspace, proc->rank, {answer, cookie}});
    return PMIX_SUCCESS;
}

// libpmix itself removes files that workers register for removal, but only if this function exists.
pmix_status_t on_job_control(const pmix_proc_t*, const pmix_proc_t[], std::size_t, const pmix_info_t[],
                             std::size_t, pmix_info_cbfunc_t, void*) {
    return PMIX_ERR_NOT_SUPPORTED;
}

// We send no events of the system: the end of one worker ends all.
pmix_status_t on_register_events(pmix_status_t*, std::size_t, const pmix_info_t[], std::size_t,
                                 pmix_op_cbfunc_t, void*) {
    return PMIX_OPERATION_SUCCEEDED;
}
pmix_status_t on_deregister_events(pmix_status_t*, std::size_t, pmix_op_cbfunc_t, void*) {
    return PMIX_OPERATION_SUCCEEDED;
}

}  // namespace

/// Calls without a function here (publish, lookup, spawn, connect, groups) get "not supported" from libpmix.
pmix_server_module_t* module_of_upcalls() {
    // A later libpmix copies a larger struct, whose further members are null.
    static struct {
        pmix_server_module_t known;
        void* later[64];
    } module;
    module.known.client_connected = on_client_connected;
    module.known.client_finalized = on_client_finalized;
    module.known.abort = on_abort;
    module.known.fence_nb = on_fence;
    module.known.direct_modex = on_direct_modex;
    module.known.job_control = on_job_control;
    module.known.register_events = on_register_events;
    module.known.deregister_events = on_deregister_events;
    return &module.known;
}

}  // namespace ddprun

#endif
