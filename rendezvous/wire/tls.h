#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "env/result.h"

/// TLS 1.3 for the wire (PROTOCOL.md), without sockets: the caller moves the bytes. libssl is loaded when the
/// first context is made, and never costs a job that does not ask for it.
///
/// The server's certificate is nobody's but this process's: it is made with its key when the context is, and
/// lives in memory alone. No authority vouches for it. The handshake's proofs do (handshake.h): they cover
/// its digest, and whoever stands between two nodes has to show another one.
namespace ddprun::rdzv {

/// What a TLS client says first.
inline constexpr char kTlsFirstByte = 0x16;

/// What all connections of a server, or of a client, have in common. Made once; sessions of any thread can
/// share it.
class TlsContext {
  public:
    /// Error: NotFound, when there is no libssl here, or this ddprun was built without it.
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

/// One connection's TLS, from the first byte on: sealed bytes on the network's side, plain ones on ours.
class TlsSession {
  public:
    /// A client's has something to send at once. Error: System (no memory).
    static Result<std::unique_ptr<TlsSession>> begin(std::shared_ptr<const TlsContext> context);
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    /// Takes what has come from the peer, in whatever pieces. What it said, which may be nothing yet; valid
    /// until the next call. Error: Refused (the peer speaks no TLS), Protocol (what it says is none that we
    /// know), Closed (later: it ends, or somebody has tampered with it). Then the session is over, and what
    /// is to be sent tells the peer so. What the peer said before that in the same bytes is returned first:
    /// end() has the error.
    Result<std::string_view> receive(std::string_view sealed);
    /// Why the session is over.
    [[nodiscard]] const Status& end() const { return end_; }
    /// Both sides have their keys: from now on there is something to seal with.
    [[nodiscard]] bool is_ready() const { return is_ready_; }
    /// Adds this to what is to be sent; once is_ready(). Error: Closed.
    Status seal(std::string_view plain);

    /// What is to be sent, and that so much of it has gone.
    [[nodiscard]] std::string_view output() const { return output_; }
    void sent(std::size_t bytes) { output_.erase(0, bytes); }

    /// What the proofs of the handshake cover: the SHA-256 digest of the server's certificate, in
    /// hexadecimal. Once is_ready().
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
