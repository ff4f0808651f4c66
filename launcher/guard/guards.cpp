#include "launcher/guard/guards.h"

#include <fmt/core.h>
#include <unistd.h>

#include <utility>

#include "env/hmac.h"

namespace ddprun {

Result<Guards> Guards::set_up(int workers, bool use_cgroup, const std::string& secret_file, os::Log& log) {
    Result<std::string> id = random_hex(8);
    if (!id) return id.error();
    Guards guards;
    guards.id = *std::move(id);
    guards.mark = make_job_mark(guards.id, own_lock_limit());
    OwnCgroup own;
    if (use_cgroup) own = look_for_own_cgroup();
    else own.why = "--cgroup none";
    if (!own.directory.empty()) {
        for (const std::string& name : remove_abandoned_cgroups(own.directory)) {
            log.info("a ddprun that was killed had left the cgroup {}/{}; ended what was in it",
                     own.directory, name);
        }
    }
    const std::string directory =
        own.directory.empty() ? "" : own.directory + "/" + job_cgroup_name(guards.id);
    const std::string place = place_of_job_directories(), files = place + "/" + job_directory_name(guards.id);
    // Start the warden first: it removes the cgroup if we are killed after we have made it.
    Result<std::unique_ptr<Warden>> warden =
        Warden::start(guards.mark, directory, workers, files, secret_file);
    if (!warden) return warden.error();
    guards.warden = *std::move(warden);
    if (!directory.empty()) {
        Result<std::unique_ptr<JobCgroup>> cgroup = JobCgroup::create(directory);
        if (cgroup) guards.cgroup = *std::move(cgroup);
        else own.why = cgroup.error().what;
    }
    if (guards.cgroup) log.debug("the workers live in the cgroup {}", directory);
    else log.debug("the workers live in our own cgroup: {}", own.why);
    for (const std::string& name : remove_abandoned_job_directories(place))
        log.info("a ddprun that was killed had left {}/{}; removed it", place, name);
    Result<std::unique_ptr<JobDirectory>> made = JobDirectory::create(files);
    if (!made) return made.error().with("a place for the files of this job (TMPDIR names another)");
    guards.files = *std::move(made);
    if (const Status opened = guards.open_store(); !opened) return opened.error();
    return guards;
}

void Guards::begin_end() {
    files.reset();
    cgroup.reset();
    if (warden) warden->say_farewell();
}

/// Opens the socket for this host's workers, in the job's directory until they can use it without a name.
Status Guards::open_store() {
    const std::string path = files->path() + "/store";
    Result<UnixListener> listener = listen_unix(path);
    if (!listener) return listener.error().with("the workers' way to the store");
    ::unlink(path.c_str());
    store = *std::move(listener);
    return {};
}

}  // namespace ddprun
