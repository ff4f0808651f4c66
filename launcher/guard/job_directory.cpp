#include "launcher/guard/job_directory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "env/io/file.h"

namespace ddprun {
namespace {

constexpr std::string_view kDirectoryPrefix = "ddprun-job-";
constexpr std::string_view kDraft = ".new";  // suffix of a directory that is not locked yet
constexpr std::chrono::seconds kDraftLife{60};
constexpr std::size_t kIdDigits = 16;

UniqueFd open_without_links(const std::string& path) {
    return UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

bool is_named_as_ours(std::string_view name) {
    if (!name.starts_with(kDirectoryPrefix)) return false;
    if (name.ends_with(kDraft)) name.remove_suffix(kDraft.size());
    const std::string_view id = name.substr(kDirectoryPrefix.size());
    return id.size() == kIdDigits && id.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_owned_by_us(const UniqueFd& directory) {
    struct stat status {};
    return directory && ::fstat(directory.get(), &status) == 0 && status.st_uid == ::geteuid();
}

bool is_younger_than(std::chrono::seconds age, const UniqueFd& directory) {
    struct stat status {};
    return ::fstat(directory.get(), &status) != 0 || status.st_mtime + age.count() > ::time(nullptr);
}

/// The lock of a directory of our user's jobs that is no longer in use; empty otherwise.
UniqueFd lock_abandoned_directory(const std::string& path) {
    UniqueFd directory = open_without_links(path);
    // A draft has no lock yet: it counts as abandoned after kDraftLife.
    if (!is_owned_by_us(directory) || (path.ends_with(kDraft) && is_younger_than(kDraftLife, directory)))
        return {};
    return ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0 ? std::move(directory) : UniqueFd();
}

}  // namespace

std::string place_of_job_directories() {
    constexpr const char* kSharedMemory = "/dev/shm";
    if (::access(kSharedMemory, W_OK | X_OK) == 0) return kSharedMemory;
    std::error_code none;
    const std::filesystem::path place = std::filesystem::temp_directory_path(none);
    return none ? "/tmp" : place.string();
}

std::string job_directory_name(std::string_view id) { return fmt::format("{}{}", kDirectoryPrefix, id); }

Result<std::unique_ptr<JobDirectory>> JobDirectory::create(const std::string& path) {
    // Lock it under a name that is no job's: a search for abandoned directories sees it locked or not at all.
    const std::string draft = path + std::string(kDraft);
    if (::mkdir(draft.c_str(), 0700) != 0) return Error::system("mkdir " + draft);
    UniqueFd lock = open_without_links(draft);
    if (::geteuid() == 0)
        ::fchmod(lock.get(), 0711);  // ignoring a failure: workers of another user then report nothing
    // Where directories cannot be locked, no other ddprun can take it for abandoned either.
    if (lock) (void)::flock(lock.get(), LOCK_EX | LOCK_NB);
    if (::rename(draft.c_str(), path.c_str()) != 0) {
        const Error error = Error::system("rename " + draft);
        ::rmdir(draft.c_str());
        return error;
    }
    return std::unique_ptr<JobDirectory>(new JobDirectory(path, std::move(lock)));
}

JobDirectory::~JobDirectory() { remove_job_directory(path_); }

void remove_job_directory(const std::string& path) {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

std::vector<std::string> abandoned_job_directories(const std::string& place) {
    std::vector<std::string> names;
    for (std::string& name : names_in(place)) {
        if (is_named_as_ours(name) && lock_abandoned_directory(place + "/" + name))
            names.push_back(std::move(name));
    }
    return names;
}

std::vector<std::string> remove_abandoned_job_directories(const std::string& place, std::size_t most) {
    std::vector<std::string> removed;
    for (std::string& name : abandoned_job_directories(place)) {
        const std::string path = place + "/" + name;
        const UniqueFd lock = removed.size() < most ? lock_abandoned_directory(path) : UniqueFd();
        if (!lock) continue;
        remove_job_directory(path);
        removed.push_back(std::move(name));
    }
    return removed;
}

}  // namespace ddprun
