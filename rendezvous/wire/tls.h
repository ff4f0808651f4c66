#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "env/result.h"

/// TLS 1.3 for the wire (PROTOCOL.md), without sockets: the caller moves the bytes. libssl is loaded when the
/// first context is made, so that jobs without TLS do not pay for it.
///
/// The server's certificate and key are made with the context and stay in this process's memory. No authority
/// has signed the certificate. The handshake's proofs (handshake.h) cover its digest instead, so that a man
/// in the middle, who has another certificate, fails.
namespace ddprun::rdzv {

/// The first byte of a TLS client.
inline constexpr char kTlsFirstByte = 0x16;

/// The TLS settings of all connections of a server, or of a client. Made once; sessions on any thread can
/// share it.
class TlsContext {
  public:
    /// Error: NotFound, when this host has no libssl, or ddprun was built without TLS.
    static Result<std::shared_ptr<const TlsContext>> for_server();
    static Result<std::shared_ptr<const TlsContext>> for_client();
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

  private:
    friend class TlsSession;
    struct Impl;
    explicit TlsContext(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

/// The TLS of one connection: sealed (encrypted) bytes on the network's side, plain bytes on ours.
class TlsSession {
  public:
    /// Begins a session; a client's has output() at once. Error: System (no memory).
    static Result<std::unique_ptr<TlsSession>> begin(std::shared_ptr<const TlsContext> context);
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    /// Takes sealed bytes from the peer, in pieces of any size, and returns the plain bytes, possibly none;
    /// they are valid until the next call. Error: Refused (the peer does not speak TLS), Protocol (TLS that
    /// we do not know), Closed (later: the peer has ended the session, or bytes were altered). The session is
    /// then over, and output() tells the peer so. If the same piece also has plain bytes, they are returned,
    /// and end() has the error.
    Result<std::string_view> receive(std::string_view sealed);
    /// Why the session is over.
    [[nodiscard]] const Status& end() const { return end_; }
    /// True when both sides have their keys, so that seal() can be called.
    [[nodiscard]] bool is_ready() const { return is_ready_; }
    /// Encrypts bytes and adds them to output(). Needs is_ready(). Error: Closed.
    Status seal(std::string_view plain);

    /// The sealed bytes to be sent; call sent() when some of them have been.
    [[nodiscard]] std::string_view output() const { return output_; }
    void sent(std::size_t bytes) { output_.erase(0, bytes); }

    /// The SHA-256 digest of the server's certificate, in hexadecimal, which the handshake's proofs cover.
    /// Needs is_ready().
    [[nodiscard]] const std::string& binding() const { return binding_; }

  private:
    struct Impl;
    TlsSession(std::shared_ptr<const TlsContext> context, std::unique_ptr<Impl> impl);
    Status advance();
    Status read_plain();
    Status judge(int outcome);
    void collect_output();

    std::shared_ptr<const TlsContext> context_;
    std::unique_ptr<Impl> impl_;
    bool is_ready_ = false, has_heard_ = false;
    std::string plain_, output_, binding_;
    Status end_;
};

}  // namespace ddprun::rdzv
