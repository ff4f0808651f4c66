#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// How messages get from one node to another: all that the collectives know of the engine that carries them.
namespace ddp::net {

/// A message on its way. Stays where it is until it is done, and so does its memory.
struct Transfer {
    void* engine[8] = {};  ///< the engine's own, and first
    bool done = false;
    bool is_long = false;  ///< for the engine
    std::size_t bytes =
        0;  ///< of a receive: that have come; or would have, had there been room. Of a send: anything
    std::string failure;  ///< why it did not arrive; "" where it did
};

/// One rank's end of the connections between the ranks of a group. One thread at a time.
///
/// Messages meet by sender and tag. Nothing moves but in look(), so whoever waits hears other things in
/// between. A send is done when its memory may be used again.
class Link {
  public:
    Link() = default;
    virtual ~Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    /// "libfabric 1.17, tcp;ofi_rxm".
    [[nodiscard]] virtual std::string describe() const = 0;
    /// Where others find this rank: bytes for their connect().
    [[nodiscard]] virtual std::string address() const = 0;
    /// The bits of a tag that the engine carries: a number of the lowest ones. Tags with others fail.
    [[nodiscard]] virtual std::uint64_t tag_mask() const = 0;
    /// Once: peers are numbered by their place; "" for those that are never spoken to. Throws Error.
    virtual void connect(const std::vector<std::string>& addresses) = 0;

    // What cannot begin now begins in a later look(). Failures show in the transfer.
    virtual void send(std::size_t peer, std::uint64_t tag, std::span<const std::byte> from,
                      Transfer& transfer) = 0;
    /// Of one that is longer than `into` a part may lie there, and Transfer::bytes says that it was longer.
    virtual void receive(std::size_t peer, std::uint64_t tag, std::span<std::byte> into,
                         Transfer& transfer) = 0;

    /// Moves what can be moved. True: a transfer was done.
    virtual bool look() = 0;
    /// Until look() may find something, `most` at the longest.
    virtual void sleep(std::chrono::milliseconds most) = 0;
    /// Ends all connections, in the middle of whatever: no memory of any transfer is touched any more, and
    /// none is done any more. The peers may find out only when this process ends.
    virtual void abandon() = 0;
};

/// Over libfabric (libfabric.so.1, found at run time): the provider that FI_PROVIDER names, else tcp, at
/// `host`, the address of an interface of ours, unless FI_TCP_IFACE names another. Throws InvalidInput: no
/// such library, or none of its providers can do it; with the remedy.
std::unique_ptr<Link> open_fabric_link(const std::string& host);

}  // namespace ddp::net
