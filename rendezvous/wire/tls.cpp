#include "rendezvous/wire/tls.h"

#include <utility>

#ifdef DDPRUN_HAVE_TLS

#include <dlfcn.h>
#include <fmt/core.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>

#include "env/hmac.h"

namespace ddprun::rdzv {
namespace {

// clang-format off
#define DDPRUN_OF_LIBSSL(X)                                                                           \
    X(OPENSSL_init_ssl) X(SSL_CTX_new) X(SSL_CTX_free) X(SSL_CTX_ctrl) X(SSL_CTX_set_num_tickets)     \
    X(SSL_CTX_use_certificate) X(SSL_CTX_use_PrivateKey) X(TLS_server_method) X(TLS_client_method)    \
    X(SSL_new) X(SSL_free) X(SSL_set_bio) X(SSL_set_accept_state) X(SSL_set_connect_state)            \
    X(SSL_do_handshake) X(SSL_read) X(SSL_write) X(SSL_get_error) X(SSL_get1_peer_certificate)        \
    X(BIO_new) X(BIO_free) X(BIO_s_mem) X(BIO_read) X(BIO_write) X(ERR_get_error) X(ERR_clear_error)  \
    X(ERR_reason_error_string) X(EVP_PKEY_Q_keygen) X(EVP_PKEY_free) X(EVP_sha256) X(X509_new)        \
    X(X509_free) X(X509_set_version) X(X509_getm_notBefore) X(X509_getm_notAfter) X(X509_gmtime_adj)  \
    X(X509_get_subject_name) X(X509_NAME_add_entry_by_txt) X(X509_set_issuer_name) X(X509_set_pubkey) \
    X(X509_sign) X(X509_digest)
// clang-format on

/// The functions of libssl that are used. It is loaded, not linked, because linking it would cost every start
/// of ddprun some tenths of a millisecond.
struct Libssl {
#define DDPRUN_DECLARE(name) decltype(&::name) name = nullptr;
    DDPRUN_OF_LIBSSL(DDPRUN_DECLARE)
#undef DDPRUN_DECLARE
};

/// Error: NotFound.
Result<Libssl> load_libssl() {
    constexpr const char* kFile = "libssl.so.3";
    void* const handle =
        ::dlopen(kFile, RTLD_NOW | RTLD_LOCAL);  // also loads libcrypto, whose functions dlsym finds too
    if (handle == nullptr) return Error{Errc::NotFound, ::dlerror(), 0};
    Libssl lib;
    const auto find = [&](const char* name, auto& function) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
        return function != nullptr;
    };
#define DDPRUN_FIND(name) \
    if (!find(#name, lib.name)) return Error{Errc::NotFound, fmt::format("{} lacks {}", kFile, #name), 0};
    DDPRUN_OF_LIBSSL(DDPRUN_FIND)
#undef DDPRUN_FIND
    // Reads no openssl.cnf, and does nothing at exit, when threads may still run.
    lib.OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
    return lib;
}

/// The library, which is never unloaded.
const Result<Libssl>& libssl() {
    static const Result<Libssl> lib = load_libssl();
    return lib;
}

std::string reason_of_failure(const Libssl& lib) {
    const char* const reason = lib.ERR_reason_error_string(lib.ERR_get_error());
    lib.ERR_clear_error();
    return reason != nullptr ? reason : "unknown failure";
}

std::string digest_of(const Libssl& lib, const X509* certificate) {
    Digest digest{};
    unsigned int bytes = 0;
    return certificate != nullptr &&
                   lib.X509_digest(certificate, lib.EVP_sha256(), digest.data(), &bytes) == 1
               ? to_hex(digest)
               : "";
}

/// Makes a self-signed certificate for `key`; null on failure. Nobody checks its names or dates.
X509* make_certificate(const Libssl& lib, EVP_PKEY* key) {
    constexpr long kDay = 24 * 60 * 60, kYears = 10 * 365 * kDay;
    constexpr int kVersion3 = 2;
    X509* const certificate = lib.X509_new();
    if (certificate == nullptr) return nullptr;
    X509_NAME* const name = lib.X509_get_subject_name(certificate);
    const auto* const text = reinterpret_cast<const unsigned char*>("ddprun");
    const bool is_made = lib.X509_set_version(certificate, kVersion3) == 1 &&
                         lib.X509_gmtime_adj(lib.X509_getm_notBefore(certificate), -kDay) != nullptr &&
                         lib.X509_gmtime_adj(lib.X509_getm_notAfter(certificate), kYears) != nullptr &&
                         lib.X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, text, -1, -1, 0) == 1 &&
                         lib.X509_set_issuer_name(certificate, name) == 1 &&
                         lib.X509_set_pubkey(certificate, key) == 1 &&
                         lib.X509_sign(certificate, key, lib.EVP_sha256()) != 0;
    if (is_made) return certificate;
    lib.X509_free(certificate);
    return nullptr;
}

}  // namespace

struct TlsContext::Impl {
    const Libssl& lib;
    SSL_CTX* settings;
    std::string binding = {};  ///< a server's only

    ~Impl() { lib.SSL_CTX_free(settings); }
    static Result<std::unique_ptr<Impl>> make(const SSL_METHOD* (*method)(), const Libssl& lib);
    Status make_identity();
};

Result<std::unique_ptr<TlsContext::Impl>> TlsContext::Impl::make(const SSL_METHOD* (*method)(),
                                                                 const Libssl& lib) {
    std::unique_ptr<Impl> impl(new Impl{lib, lib.SSL_CTX_new(method())});
    if (impl->settings == nullptr) return Error{Errc::System, "TLS: " + reason_of_failure(lib), 0};
    lib.SSL_CTX_ctrl(impl->settings, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr);
    lib.SSL_CTX_ctrl(impl->settings, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS,
                     nullptr);                       // an idle connection keeps no buffers
    lib.SSL_CTX_set_num_tickets(impl->settings, 0);  // TLS sessions are not resumed
    return impl;
}

Status TlsContext::Impl::make_identity() {
    EVP_PKEY* const key = lib.EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256");
    X509* const certificate = key != nullptr ? make_certificate(lib, key) : nullptr;
    const bool is_ours = certificate != nullptr && lib.SSL_CTX_use_certificate(settings, certificate) == 1 &&
                         lib.SSL_CTX_use_PrivateKey(settings, key) == 1;
    binding = digest_of(lib, certificate);
    lib.X509_free(certificate);
    lib.EVP_PKEY_free(key);
    return is_ours && !binding.empty()
               ? Status()
               : Status(Error{Errc::System, "a certificate for TLS: " + reason_of_failure(lib), 0});
}

Result<std::shared_ptr<const TlsContext>> TlsContext::for_server() {
    if (!libssl()) return libssl().error();
    Result<std::unique_ptr<Impl>> impl = Impl::make(libssl()->TLS_server_method, *libssl());
    if (!impl) return impl.error();
    if (const Status made = (*impl)->make_identity(); !made) return made.error();
    return std::shared_ptr<const TlsContext>(new TlsContext(*std::move(impl)));
}

Result<std::shared_ptr<const TlsContext>> TlsContext::for_client() {
    if (!libssl()) return libssl().error();
    Result<std::unique_ptr<Impl>> impl = Impl::make(libssl()->TLS_client_method, *libssl());
    if (!impl) return impl.error();
    return std::shared_ptr<const TlsContext>(new TlsContext(*std::move(impl)));
}

// ---- a session

struct TlsSession::Impl {
    const Libssl& lib;
    SSL* ssl;
    BIO* in;  ///< `in` and `out` belong to `ssl`
    BIO* out;

    ~Impl() { lib.SSL_free(ssl); }
};

Result<std::unique_ptr<TlsSession>> TlsSession::begin(std::shared_ptr<const TlsContext> context) {
    const Libssl& lib = context->impl_->lib;
    lib.ERR_clear_error();
    auto impl = std::unique_ptr<Impl>(new Impl{lib, lib.SSL_new(context->impl_->settings),
                                               lib.BIO_new(lib.BIO_s_mem()), lib.BIO_new(lib.BIO_s_mem())});
    if (impl->ssl == nullptr || impl->in == nullptr || impl->out == nullptr) {
        lib.BIO_free(impl->in);
        lib.BIO_free(impl->out);
        return Error{Errc::System, "TLS: " + reason_of_failure(lib), 0};
    }
    lib.SSL_set_bio(impl->ssl, impl->in, impl->out);
    const bool is_server = !context->impl_->binding.empty();
    if (is_server) lib.SSL_set_accept_state(impl->ssl);
    else lib.SSL_set_connect_state(impl->ssl);
    std::unique_ptr<TlsSession> session(new TlsSession(std::move(context), std::move(impl)));
    if (const Status begun = is_server ? Status() : session->advance(); !begun) return begun.error();
    session->collect_output();
    return session;
}

Result<std::string_view> TlsSession::receive(std::string_view sealed) {
    plain_.clear();
    if (!end_) return end_.error();
    if (sealed.empty()) return std::string_view();
    // Only handshake records and alerts can be a peer's first bytes.
    const bool is_tls = has_heard_ || sealed.front() == kTlsFirstByte || sealed.front() == SSL3_RT_ALERT;
    if (!is_tls) {
        end_ = Error{Errc::Refused, "it speaks no TLS: give --tls to every node, or to none", 0};
        return end_.error();
    }
    has_heard_ = true;
    impl_->lib.BIO_write(impl_->in, sealed.data(), static_cast<int>(sealed.size()));
    end_ = is_ready_ ? Status() : advance();
    if (end_ && is_ready_) end_ = read_plain();
    collect_output();
    if (!end_ && plain_.empty()) return end_.error();
    return std::string_view(plain_);
}

/// Continues TLS's own handshake.
Status TlsSession::advance() {
    const int outcome = impl_->lib.SSL_do_handshake(impl_->ssl);
    if (outcome != 1) return judge(outcome);
    is_ready_ = true;
    binding_ = context_->impl_->binding;
    if (!binding_.empty()) return {};
    X509* const certificate = impl_->lib.SSL_get1_peer_certificate(impl_->ssl);
    binding_ = digest_of(impl_->lib, certificate);
    impl_->lib.X509_free(certificate);
    return binding_.empty() ? Status(Error{Errc::Protocol, "TLS: the server showed no certificate", 0})
                            : Status();
}

Status TlsSession::read_plain() {
    std::array<char, 16 * 1024> record;
    for (;;) {
        const int got = impl_->lib.SSL_read(impl_->ssl, record.data(), static_cast<int>(record.size()));
        if (got <= 0) return judge(got);
        plain_.append(record.data(), static_cast<std::size_t>(got));
    }
}

Status TlsSession::seal(std::string_view plain) {
    if (plain.empty()) return {};
    const int outcome = impl_->lib.SSL_write(impl_->ssl, plain.data(), static_cast<int>(plain.size()));
    collect_output();
    return outcome > 0 ? Status() : judge(outcome);
}

/// Judges an unfinished call of libssl. Waiting for the peer's bytes is no error. Forged bytes can only end
/// an established connection, as cutting the cable would.
Status TlsSession::judge(int outcome) {
    const int why = impl_->lib.SSL_get_error(impl_->ssl, outcome);
    if (why == SSL_ERROR_WANT_READ) return {};
    if (why == SSL_ERROR_ZERO_RETURN) return Error{Errc::Closed, "the peer has ended TLS", 0};
    return Error{is_ready_ ? Errc::Closed : Errc::Protocol, "TLS: " + reason_of_failure(impl_->lib), 0};
}

void TlsSession::collect_output() {
    std::array<char, 16 * 1024> piece;
    for (int got = 0;
         (got = impl_->lib.BIO_read(impl_->out, piece.data(), static_cast<int>(piece.size()))) > 0;) {
        output_.append(piece.data(), static_cast<std::size_t>(got));
    }
}

#else

namespace ddprun::rdzv {

struct TlsContext::Impl {};
struct TlsSession::Impl {};

namespace {
Error built_without() { return {Errc::NotFound, "this ddprun was built without OpenSSL 3", 0}; }
}  // namespace

Result<std::shared_ptr<const TlsContext>> TlsContext::for_server() { return built_without(); }
Result<std::shared_ptr<const TlsContext>> TlsContext::for_client() { return built_without(); }
Result<std::unique_ptr<TlsSession>> TlsSession::begin(std::shared_ptr<const TlsContext>) {
    return built_without();
}
Result<std::string_view> TlsSession::receive(std::string_view) { return built_without(); }
Status TlsSession::seal(std::string_view) { return built_without(); }

#endif

TlsContext::TlsContext(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsContext::~TlsContext() = default;
TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, std::unique_ptr<Impl> impl)
    : context_(std::move(context)), impl_(std::move(impl)) {}
TlsSession::~TlsSession() = default;

}  // namespace ddprun::rdzv
