#include <dlfcn.h>
#include <fmt/core.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>

#include "ddp/net/link.h"
#include "ddp/types.h"
#include "env/clock.h"
#include "env/io/library.h"

namespace ddp::net {

namespace {

constexpr const char* kLibrary = "libfabric.so.1";
constexpr std::size_t kLongMessage =
    128 *
    1024;  // bytes; libfabric's tcp provider reads longer messages from their sender's memory, piece by piece
constexpr std::chrono::milliseconds kLastReceives{100};  ///< limit for the end of long messages
constexpr std::uint32_t kInterface = FI_VERSION(1, 9);   // everything that we use is older

/// The functions that libfabric exports; all others are in tables of its objects.
struct FabricApi {
    decltype(&::fi_getinfo) getinfo = nullptr;
    decltype(&::fi_freeinfo) freeinfo = nullptr;
    decltype(&::fi_dupinfo) dupinfo = nullptr;
    decltype(&::fi_fabric) fabric = nullptr;
    decltype(&::fi_strerror) strerror = nullptr;
    decltype(&::fi_version) version = nullptr;
};

template <class Function>
void find(void* library, const char* name, Function& function) {
    if (!ddprun::find_function(library, name, function))
        throw InvalidInput(fmt::format("{} has no {}: another library of that name", kLibrary, name));
}

std::string requested_provider() {
    const char* const named = std::getenv("FI_PROVIDER");
    return named == nullptr || *named == '\0' ? "tcp" : named;
}

/// Lets messages of up to 72 KiB travel in one part: the longest payload of a header, and the pieces of calls
/// of up to 256 KiB. They travel in parts of 16 KiB otherwise, which takes up to twice as long. Fewer buffers
/// keep the memory as it was; a transfer that finds none starts later.
void enlarge_buffers() {
    for (const auto& [variable, value] : {std::pair{"FI_OFI_RXM_BUFFER_SIZE", "73728"},
                                          {"FI_OFI_RXM_TX_SIZE", "512"},
                                          {"FI_OFI_RXM_MSG_TX_SIZE", "16"},
                                          {"FI_OFI_RXM_MSG_RX_SIZE", "16"}})
        ::setenv(variable, value, 0);
}

/// The library stays loaded: its providers may have threads.
const FabricApi& fabric_api() {
    static const FabricApi found = [] {
        ::setenv("IPATH_NO_BACKTRACE", "1",
                 0);  // keeps libinfinipath from installing signal handlers, also while it loads
        if (requested_provider().starts_with("tcp")) enlarge_buffers();
        void* const library = ddprun::load_library(kLibrary);
        if (library == nullptr) {
            throw InvalidInput(fmt::format(
                "the cpu backend needs libfabric for other nodes, and cannot load it: {} (install libfabric, "
                "or start all ranks on one node)",
                ::dlerror()));
        }
        FabricApi api;
        find(library, "fi_getinfo", api.getinfo);
        find(library, "fi_freeinfo", api.freeinfo);
        find(library, "fi_dupinfo", api.dupinfo);
        find(library, "fi_fabric", api.fabric);
        find(library, "fi_strerror", api.strerror);
        find(library, "fi_version", api.version);
        return api;
    }();
    return found;
}

/// An object of libfabric, closed by the destructor.
template <class T>
struct Handle {
    T* object = nullptr;
    Handle() = default;
    ~Handle() { close(); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    void close() {
        if (object != nullptr) ::fi_close(release());
    }
    fid* release() { return &std::exchange(object, nullptr)->fid; }
};

/// What abandoned links have left open, where leak checkers find it.
struct LeftOpen {
    std::mutex mutex;
    std::vector<std::array<fid*, 5>> links;
    static LeftOpen& of_process() {
        static auto& left = *new LeftOpen;
        return left;
    }
};

using InfoList = std::unique_ptr<fi_info, decltype(&::fi_freeinfo)>;

class FabricLink final : public Link {
  public:
    explicit FabricLink(const std::string& host) : api_(fabric_api()), info_(choose(host)) {
        check(api_.fabric(info_->fabric_attr, &fabric_.object, nullptr), "fi_fabric");
        check(::fi_domain(fabric_.object, info_.get(), &domain_.object, nullptr), "fi_domain");
        fi_av_attr table{};
        table.type = FI_AV_TABLE;
        check(::fi_av_open(domain_.object, &table, &addresses_.object, nullptr), "fi_av_open");
        open_queue();
        check(::fi_endpoint(domain_.object, info_.get(), &endpoint_.object, nullptr), "fi_endpoint");
        check(::fi_ep_bind(endpoint_.object, &addresses_.object->fid, 0), "fi_ep_bind");
        check(::fi_ep_bind(endpoint_.object, &queue_.object->fid, FI_SEND | FI_RECV), "fi_ep_bind");
        check(::fi_enable(endpoint_.object), "fi_enable");
    }

    std::string describe() const override {
        const std::uint32_t version = api_.version();
        return fmt::format("libfabric {}.{}, {}", FI_MAJOR(version), FI_MINOR(version),
                           info_->fabric_attr->prov_name);
    }

    std::string address() const override {
        std::array<char, 512> name{};
        std::size_t length = name.size();
        check(::fi_getname(&endpoint_.object->fid, name.data(), &length), "fi_getname");
        return {name.data(), length};
    }

    // The provider ignores the leading 0 bits of the format (fi_endpoint(3)). cxi refuses tags that use them.
    std::uint64_t tag_mask() const override {
        const std::uint64_t format = info_->ep_attr->mem_tag_format;
        return ~std::uint64_t{0} >> (format == 0 ? 0 : std::countl_zero(format));
    }

    void connect(const std::vector<std::string>& addresses) override {
        const std::size_t length = address().size();
        for (const std::string& one : addresses) {
            fi_addr_t peer = FI_ADDR_UNSPEC;
            if (!one.empty() && (one.size() != length ||
                                 ::fi_av_insert(addresses_.object, one.data(), 1, &peer, 0, nullptr) != 1))
                throw Error(fmt::format(
                    "{}: the address of rank {} is invalid: do all nodes have the same libfabric and FI_PROVIDER?",
                    describe(), peers_.size()));
            peers_.push_back(peer);
        }
    }

    void send(std::size_t peer, std::uint64_t tag, std::span<const std::byte> from,
              Transfer& transfer) override {
        begin({[=, this, &transfer] {
                   return ::fi_tsend(endpoint_.object, from.data(), from.size(), nullptr, peers_[peer], tag,
                                     transfer.engine);
               },
               &transfer});
    }
    void receive(std::size_t peer, std::uint64_t tag, std::span<std::byte> into,
                 Transfer& transfer) override {
        begin({[=, this, &transfer] {
                   const ssize_t code = ::fi_trecv(endpoint_.object, into.data(), into.size(), nullptr,
                                                   peers_[peer], tag, 0, transfer.engine);
                   if (code == 0 && into.size() > kLongMessage) long_receives_.push_back(&transfer);
                   return code;
               },
               &transfer});
    }

    bool progress() override {
        if (queue_.object == nullptr) return false;
        bool any = drain();
        for (; !held_back_.empty(); held_back_.pop_front(), any = true) {
            if (!try_to_begin(held_back_.front())) break;
        }
        return any;
    }

    void sleep(std::chrono::milliseconds most) override {
        if (queue_.object == nullptr || descriptor_ < 0) return;
        fid* waited = &queue_.object->fid;
        if (::fi_trywait(fabric_.object, &waited, 1) != FI_SUCCESS) return;
        pollfd entry{.fd = descriptor_, .events = POLLIN, .revents = 0};
        // A transfer that is held back has no event of its own.
        (void)::poll(&entry, 1, held_back_.empty() ? static_cast<int>(most.count()) : 1);
    }

    // libfabric's tcp provider (1.17) frees a long message twice when a connection is closed while the
    // message arrives. It moves data only when it is polled, so in this case the objects stay open and unused
    // for ever. An adapter that writes to memory by itself must be closed.
    void abandon() override {
        held_back_.clear();
        if (is_abandoned_) return;
        is_abandoned_ = true;
        if (std::string_view(info_->fabric_attr->prov_name).starts_with("tcp") && !end_long_receives())
            return leave_open();
        endpoint_.close();
        queue_.close();
    }

  private:
    /// Cancels the long messages that have not begun to arrive, and receives the others, or the end of their
    /// connections. False: this takes too long.
    bool end_long_receives() {
        for (Transfer* const one : long_receives_) ::fi_cancel(&endpoint_.object->fid, one->engine);
        const auto until = ddprun::MonotonicClock::now() + kLastReceives;
        while (!long_receives_.empty() && ddprun::MonotonicClock::now() < until) {
            if (!progress()) sleep(std::chrono::milliseconds(1));
        }
        return long_receives_.empty();
    }
    void leave_open() {
        LeftOpen& left = LeftOpen::of_process();
        const std::lock_guard lock(left.mutex);
        left.links.push_back({endpoint_.release(), queue_.release(), addresses_.release(), domain_.release(),
                              fabric_.release()});
    }

    struct Attempt {
        std::function<ssize_t()> make;
        Transfer* transfer;
    };

    InfoList choose(const std::string& host) const {
        const std::string provider = requested_provider();
        const InfoList hints(api_.dupinfo(nullptr), api_.freeinfo);
        hints->caps = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_REMOTE_COMM;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->ep_attr->type = FI_EP_RDM;
        hints->domain_attr->mr_mode = FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
        hints->domain_attr->threading = FI_THREAD_DOMAIN;
        hints->domain_attr->control_progress = hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
        hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
        // libfabric itself reads the variable, which may be a list or an exclusion.
        if (std::getenv("FI_PROVIDER") == nullptr) hints->fabric_attr->prov_name = ::strdup(provider.c_str());
        // Only providers over IP know addresses of interfaces.
        const auto is_of = [&](const char* family) { return provider.starts_with(family); };
        const bool is_ip = is_of("tcp") || is_of("net") || is_of("sockets") || is_of("udp");
        const auto is_set = [](const char* variable) { return std::getenv(variable) != nullptr; };
        const bool at_host =
            is_ip && !is_set("FI_TCP_IFACE") && !is_set("FI_SOCKETS_IFACE") && !is_set("FI_UDP_IFACE");
        fi_info* list = nullptr;
        const int code = api_.getinfo(kInterface, at_host ? host.c_str() : nullptr, at_host ? "0" : nullptr,
                                      at_host ? FI_SOURCE : 0, hints.get(), &list);
        if (code != 0) {
            throw InvalidInput(fmt::format(
                "libfabric has no provider '{}' with reliable tagged messages to other hosts{}: {}: set FI_PROVIDER to "
                "one that it has (fi_info -l)",
                provider, at_host ? " at " + host : "", api_.strerror(-code)));
        }
        return {list, api_.freeinfo};
    }

    // Some providers have no descriptor that a thread could sleep on: then the link polls.
    void open_queue() {
        fi_cq_attr wanted{};
        wanted.format = FI_CQ_FORMAT_TAGGED;
        wanted.wait_obj = FI_WAIT_FD;
        if (::fi_cq_open(domain_.object, &wanted, &queue_.object, nullptr) == 0 &&
            ::fi_control(&queue_.object->fid, FI_GETWAIT, &descriptor_) == 0)
            return;
        queue_.close();
        descriptor_ = -1;
        wanted.wait_obj = FI_WAIT_NONE;
        check(::fi_cq_open(domain_.object, &wanted, &queue_.object, nullptr), "fi_cq_open");
    }

    void check(ssize_t code, const char* call) const {
        if (code < 0)
            throw Error(fmt::format("{} (libfabric, {}): {}", call, info_->fabric_attr->prov_name,
                                    api_.strerror(static_cast<int>(-code))));
    }

    void begin(const Attempt& attempt) {
        if (!held_back_.empty() || !try_to_begin(attempt)) held_back_.push_back(attempt);
    }
    /// False: it cannot start now.
    bool try_to_begin(const Attempt& attempt) {
        const ssize_t code = queue_.object == nullptr ? -FI_EOPBADSTATE : attempt.make();
        if (code == -FI_EAGAIN) return false;
        if (code < 0) fail(*attempt.transfer, static_cast<int>(-code));
        return true;
    }
    void note_end(Transfer& transfer) {
        transfer.done = true;
        std::erase(long_receives_, &transfer);
    }
    void fail(Transfer& transfer, int code) {
        transfer.failure = api_.strerror(code);
        note_end(transfer);
    }

    bool drain() {
        std::array<fi_cq_tagged_entry, 16> entries;
        const ssize_t count = ::fi_cq_read(queue_.object, entries.data(), entries.size());
        if (count == -FI_EAVAIL) return take_error();
        for (ssize_t i = 0; i < count; ++i) {
            const fi_cq_tagged_entry& entry = entries[static_cast<std::size_t>(i)];
            auto* const transfer = static_cast<Transfer*>(entry.op_context);
            if (transfer == nullptr) continue;
            transfer->bytes = entry.len;
            note_end(*transfer);
        }
        return count > 0;
    }
    bool take_error() {
        fi_cq_err_entry entry{};
        if (::fi_cq_readerr(queue_.object, &entry, 0) < 1 || entry.op_context == nullptr) return false;
        auto* const transfer = static_cast<Transfer*>(entry.op_context);
        transfer->bytes =
            entry.len + std::max<std::size_t>(entry.olen, 1);  // not all providers give the whole length
        if (entry.err != FI_ETRUNC) fail(*transfer, entry.err);
        else note_end(*transfer);
        return true;
    }

    const FabricApi& api_;
    const InfoList info_;
    Handle<fid_fabric> fabric_;
    Handle<fid_domain> domain_;
    Handle<fid_av> addresses_;
    Handle<fid_cq> queue_;
    Handle<fid_ep> endpoint_;
    int descriptor_ = -1;
    std::vector<Transfer*> long_receives_;  ///< begun and not done
    bool is_abandoned_ = false;
    std::vector<fi_addr_t> peers_;
    std::deque<Attempt> held_back_;
};

}  // namespace

std::unique_ptr<Link> open_fabric_link(const std::string& host) {
    const ddprun::KeptSignals kept;  // providers load libraries when they are queried or opened
    return std::make_unique<FabricLink>(host);
}

std::size_t leaked_links() {
    LeftOpen& left = LeftOpen::of_process();
    const std::lock_guard lock(left.mutex);
    return left.links.size();
}

}  // namespace ddp::net
