#include "launcher/start/job_token.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/unique_fd.h"
#include "launcher/plan/head_choice.h"

namespace ddprun {
namespace {

std::string directory_of_secret(const std::string& path) { return path.substr(0, path.rfind('/')); }

/// Like make_directories, but new directories are for their owner only, as XDG's are.
Status make_private_directories(const std::string& directory) {
    for (std::size_t end = 0; end != std::string::npos;) {
        end = directory.find('/', end + 1);
        const std::string upto = directory.substr(0, end);
        if (::mkdir(upto.c_str(), 0700) != 0 && errno != EEXIST) return Error::system("mkdir " + upto);
    }
    return {};
}

/// What is wrong with the file of our secret; "" nothing. Pure.
std::string fault_of_secret(const struct stat& status, uid_t us) {
    if (status.st_uid != us)
        return fmt::format("belongs to user {}, not to {}: whoever made it knows it", status.st_uid, us);
    if ((status.st_mode & 0077) != 0) {
        return fmt::format(
            "can be read or written by others (mode {:04o}): make another (rm it), or chmod 600 where "
            "nobody has read it",
            status.st_mode & 07777);
    }
    return "";
}

Error refused_secret(const std::string& path, const std::string& fault) {
    return {Errc::Refused, fmt::format("{} {}", path, fault), 0};
}

/// Checks the directory as sshd checks ~/.ssh, because a user who can write to it can put a known secret
/// there: the directory, and a symbolic link in its place, is ours or root's, and nobody else can write to
/// it. Error: Refused, System.
Status check_directory_of_secret(const std::string& directory) {
    struct stat named {
    }, status{};
    if (::lstat(directory.c_str(), &named) != 0 || ::stat(directory.c_str(), &status) != 0)
        return Error::system("stat " + directory);
    for (const uid_t owner : {named.st_uid, status.st_uid}) {
        if (owner == ::geteuid() || owner == 0) continue;
        return refused_secret(
            directory, fmt::format("belongs to user {}, who can put a secret of his own there", owner));
    }
    if ((status.st_mode & 0022) == 0) return {};
    return refused_secret(
        directory,
        fmt::format(
            "can be written by others (mode {:04o}), who can put a secret of their own there: chmod 700 it",
            status.st_mode & 07777));
}

/// Error: System with ENOENT when there is no secret; Refused.
Result<std::string> read_user_secret(const std::string& path) {
    const Result<UniqueFd> opened = open_regular_file(path);
    if (!opened) return opened.error();
    if (const Status judged = check_directory_of_secret(directory_of_secret(path)); !judged)
        return judged.error();
    struct stat named {};
    if (::lstat(path.c_str(), &named) == 0 && S_ISLNK(named.st_mode)) {
        return refused_secret(path, "is a symbolic link: copy the file that it names in its place");
    }
    // fstat judges the opened file: the name could be another file's by now.
    struct stat status {};
    if (::fstat(opened->get(), &status) != 0) return Error::system("stat " + path);
    if (const std::string fault = fault_of_secret(status, ::geteuid()); !fault.empty())
        return refused_secret(path, fault);

    std::string bytes(kMaxSecretBytes + 1, '\0');
    std::size_t have = 0;
    while (have < bytes.size()) {
        const ssize_t got = ::read(opened->get(), bytes.data() + have, bytes.size() - have);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return Error::system("read " + path);
        if (got == 0) break;
        have += static_cast<std::size_t>(got);
    }
    bytes.resize(have);
    if (have < kUserSecretBytes) {
        return refused_secret(
            path,
            fmt::format("is too short for a secret ({} bytes, at least {}): remove it, and another is made",
                        have, kUserSecretBytes));
    }
    if (have > kMaxSecretBytes)
        return refused_secret(path, fmt::format("is longer than {} bytes", kMaxSecretBytes));
    return bytes;
}

bool is_missing(const Error& error) {
    return error.code == Errc::System && (error.sys == ENOENT || error.sys == ESTALE);
}

/// Writes a secret to a new file beside its final place, and to the disk.
Status write_candidate(UniqueFd& fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd.get(), bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return Error::system("write");
        bytes.remove_prefix(static_cast<std::size_t>(written));
    }
    // mkostemp asks for 0600, but a file server may set another mode.
    if (::fchmod(fd.get(), 0600) != 0) return Error::system("chmod");
    if (::fsync(fd.get()) != 0) return Error::system("fsync");
    if (::close(fd.release()) != 0) return Error::system("close");  // where NFS reports a full disk
    return {};
}

/// A shorter DDPRUN_TOKEN gives a warning: 16 random letters and digits are more than 80 bits.
constexpr std::size_t kShortestToken = 16;
/// The head may have the same secret and not use it: a refused node cannot tell.
constexpr std::string_view kOrInsecure = "; if the head was started with --insecure, all nodes need it";
constexpr std::string_view kGiveToken = "set DDPRUN_TOKEN to the same random text on all nodes";

bool wants_insecure(const JobSpec& spec, const EnvironmentLookup& variable) {
    return spec.rendezvous.insecure || variable("DDPRUN_INSECURE").value_or("") == "1";
}

JobToken insecure_token(const JobSpec& spec) {
    return {
        to_hex(hmac_sha256("ddprun", spec.rendezvous.run_id)),
        fmt::format(
            "--insecure: whoever reaches the port of this job can join it, stop it and rewrite its store; "
            "{} instead",
            kGiveToken),
        "it has a secret where this node has none (--insecure): give --insecure to all nodes or to none"};
}

Error without_secret(const Error& why) {
    return {Errc::InvalidArgument,
            fmt::format(
                "several nodes need a secret that they share: {}; {}, or give --insecure where nobody else "
                "reaches the port",
                why.what, kGiveToken),
            0};
}

}  // namespace

Result<std::string> user_secret_path(const EnvironmentLookup& variable) {
    // The XDG specification says to ignore a relative path.
    if (const auto config = variable("XDG_CONFIG_HOME"); config && config->starts_with('/'))
        return *config + "/ddprun/secret";
    if (const auto home = variable("HOME"); home && home->starts_with('/'))
        return *home + "/.config/ddprun/secret";
    return Error{Errc::NotFound, "neither XDG_CONFIG_HOME nor HOME is set to an absolute path", 0};
}

Result<UserSecret> settle_user_secret(const std::string& path, std::string_view fresh) {
    const std::string directory = directory_of_secret(path);
    if (const Status made = make_private_directories(directory); !made) return made.error();
    if (const Status judged = check_directory_of_secret(directory); !judged) return judged.error();
    std::string candidate = path + ".new.XXXXXX";
    UniqueFd fd(::mkostemp(candidate.data(), O_CLOEXEC));
    if (!fd) return Error::system("write " + path);
    const Status written = write_candidate(fd, fresh);
    // link() never replaces a file, on NFS too, as rename() would: a second process finds the first one's.
    // NFS may report a failure although the link was made (a lost answer), so the file decides, not the
    // result.
    const int failure = !written ? 0 : ::link(candidate.c_str(), path.c_str()) == 0 ? 0 : errno;
    ::unlink(candidate.c_str());
    if (!written) return written.error().with("write " + path);
    Result<std::string> settled = read_user_secret(path);
    if (!settled && failure != 0 && is_missing(settled.error()))
        return Error::system("link " + path, failure);
    if (!settled) return settled.error();
    const bool is_ours = *settled == fresh;
    return UserSecret{*std::move(settled), is_ours};
}

Result<UserSecret> user_secret(const std::string& path) {
    Result<std::string> present = read_user_secret(path);
    if (present) return UserSecret{*std::move(present), false};
    if (!is_missing(present.error())) return present.error();
    const Result<std::string> hex = random_hex(kUserSecretBytes);
    if (!hex) return hex.error();
    const Result<std::string> fresh = from_hex(*hex);
    if (!fresh) return fresh.error();
    return settle_user_secret(path, *fresh);
}

std::string derive_job_token(std::string_view secret, std::string_view run_id, std::uint16_t port) {
    // The id comes last and the port contains no separator, so no two jobs share a text.
    return to_hex(hmac_sha256(secret, fmt::format("ddprun job token 1\n{}\n{}", port, run_id)));
}

Result<JobToken> choose_job_token(const JobSpec& spec, const EnvironmentLookup& variable) {
    if (spec.nodes.max == 1) {
        Result<std::string> random = random_hex(16);
        if (!random) return random.error();
        return JobToken{*std::move(random), "", ""};
    }
    if (const std::optional<std::string> given = variable("DDPRUN_TOKEN"); given && !given->empty()) {
        const std::string warning =
            given->size() >= kShortestToken
                ? ""
                : fmt::format(
                      "DDPRUN_TOKEN has {} characters and could be guessed from recorded traffic; use at "
                      "least {} random "
                      "characters",
                      given->size(), kShortestToken);
        return JobToken{
            *given, warning,
            fmt::format(
                "its secret is not the DDPRUN_TOKEN of this node: set it to the same text on all nodes, or "
                "on none{}",
                kOrInsecure)};
    }
    if (wants_insecure(spec, variable)) return insecure_token(spec);
    const Result<std::string> path = user_secret_path(variable);
    if (!path) return without_secret(path.error());
    const Result<UserSecret> secret = user_secret(*path);
    if (!secret) return without_secret(secret.error());
    const std::uint16_t port = shared_endpoint(spec).value_or(Endpoint{}).port;
    return JobToken{
        derive_job_token(secret->bytes, spec.rendezvous.run_id, port), "",
        fmt::format("its secret is not the one in {}{}: copy that file from the head's node, or {}{}", *path,
                    secret->is_new ? ", which was made just now" : "", kGiveToken, kOrInsecure)};
}

}  // namespace ddprun
