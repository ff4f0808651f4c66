#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// The transport between nodes, as the collectives see it.
namespace ddp::net {

/// A message in transit. It keeps its address until it is done, and so does its memory.
struct Transfer {
    void* engine[8] = {};  ///< used by the transport; first, as libfabric's fi_context2
    bool done = false;
    std::size_t bytes = 0;  ///< of a receive: bytes received, or a larger number when the message did not
                            ///< fit. Of a send: undefined
    std::string failure;    ///< reason of a failure; "" after success
};

/// One rank's end of the connections between the ranks of a group. One thread at a time.
///
/// Sends and receives are matched by sender and tag. Data moves only inside progress(), so a waiting rank
/// must call it. A send is done when its memory may be used again.
class Link {
  public:
    Link() = default;
    virtual ~Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    /// "libfabric 1.17, tcp;ofi_rxm".
    [[nodiscard]] virtual std::string describe() const = 0;
    /// The address of this rank: bytes for the connect() of other ranks.
    [[nodiscard]] virtual std::string address() const = 0;
    /// The bits of a tag that the transport carries: some number of the lowest bits. Tags with other bits
    /// fail.
    [[nodiscard]] virtual std::uint64_t tag_mask() const = 0;
    /// Called once: peers are numbered by their position; "" for peers that get no messages. Throws Error.
    virtual void connect(const std::vector<std::string>& addresses) = 0;

    // A transfer that cannot start now starts in a later progress(). Failures show in the transfer.
    virtual void send(std::size_t peer, std::uint64_t tag, std::span<const std::byte> from,
                      Transfer& transfer) = 0;
    /// When the message is longer than `into`, a part may lie there, and Transfer::bytes is larger than
    /// `into`.
    virtual void receive(std::size_t peer, std::uint64_t tag, std::span<std::byte> into,
                         Transfer& transfer) = 0;

    /// Moves data. True: a transfer was done.
    virtual bool progress() = 0;
    /// Sleeps until progress() may find an event, `most` at the longest.
    virtual void sleep(std::chrono::milliseconds most) = 0;
    /// Ends all connections at once: no memory of any transfer is used any more, and no transfer completes
    /// any more. The peers may notice only when this process ends.
    virtual void abandon() = 0;
};

/// A Link over libfabric (libfabric.so.1, found at run time): the provider in FI_PROVIDER, else tcp, bound to
/// `host`, the address of an interface of this host, unless FI_TCP_IFACE names another one. Throws
/// InvalidInput with the remedy: the library is missing, or none of its providers fits.
std::unique_ptr<Link> open_fabric_link(const std::string& host);

/// The number of links of this process whose descriptors and memory, about 150 MiB each, stay in use until it
/// ends, because they were abandoned while a long message arrived.
std::size_t leaked_links();

}  // namespace ddp::net
