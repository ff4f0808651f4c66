#include "launcher/questions/job_curves.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "env/os/keepalive.h"

namespace ddprun {
namespace {

constexpr double kMiB = 1024 * 1024;
/// The driver is asked by a process on each node with GPUs, which is not cheap.
constexpr Duration kGpuPause = std::chrono::seconds(5);

/// Sum, smallest and largest of some values.
struct Tally {
    int count = 0;
    double sum = 0, least = 0, most = 0;

    void add(double value) {
        least = count == 0 ? value : std::min(least, value);
        most = count == 0 ? value : std::max(most, value);
        sum += value;
        ++count;
    }
    [[nodiscard]] double mean() const { return count == 0 ? 0 : sum / count; }
};

void add_workers(const JobStatus* before, const JobStatus& now, std::vector<Scalar>& scalars) {
    Tally cpu, memory, step, rate, communication;
    for (const WorkerStatus& worker : now.workers) {
        if (worker.pid == 0 || worker.state == "ended") continue;
        const WorkerRates rates = rates_between(before, worker);
        cpu.add(rates.cpu_percent);
        memory.add(static_cast<double>(worker.rss_bytes) / kMiB);
        if (worker.reports_steps) {
            step.add(static_cast<double>(worker.step));
            rate.add(rates.steps_per_second);
        }
        if (worker.uses_libddp) communication.add(rates.comm_percent);
    }
    scalars.push_back({"job/workers", static_cast<double>(cpu.count)});
    if (cpu.count > 0) {
        scalars.push_back({"cpu/percent_of_a_core_per_worker", cpu.mean()});
        scalars.push_back({"memory/mib_of_all_workers", memory.sum});
        scalars.push_back({"memory/mib_of_largest_worker", memory.most});
    }
    if (step.count > 0) {
        scalars.push_back({"steps/done", step.least});
        scalars.push_back({"steps/per_second", rate.mean()});
    }
    if (communication.count > 0) {
        scalars.push_back({"communication/percent_of_time", communication.mean()});
        // The rank that comes last to a collective waits for nobody: what the others spend more is waiting.
        scalars.push_back(
            {"communication/waiting_percent_of_time", communication.mean() - communication.least});
    }
}

void add_hosts(const JobStatus& now, std::vector<Scalar>& scalars) {
    Tally busy, memory;
    int silent = 0;
    for (const HostStatus& host : now.hosts) {
        silent += host.trouble.empty() ? 0 : 1;
        for (const GpuUsage& gpu : host.gpus) {
            busy.add(gpu.busy_percent);
            memory.add(static_cast<double>(gpu.used_bytes) / kMiB);
        }
    }
    scalars.push_back({"job/nodes_without_answer", static_cast<double>(silent)});
    if (busy.count == 0) return;
    scalars.push_back({"gpu/busy_percent", busy.mean()});
    scalars.push_back({"gpu/mib_of_fullest", memory.most});
}

Status create(std::unique_ptr<CurveFile>& file, const std::string& directory) {
    if (file) return {};
    Result<std::unique_ptr<CurveFile>> created = CurveFile::create(directory);
    if (!created) return created.error();
    file = *std::move(created);
    return {};
}

}  // namespace

std::vector<Scalar> scalars_of(const JobStatus* before, const JobStatus& now) {
    std::vector<Scalar> scalars = {{"job/generation", static_cast<double>(now.generation)},
                                   {"job/restarts", static_cast<double>(now.restarts_used)}};
    add_workers(before, now, scalars);
    add_hosts(now, scalars);
    return scalars;
}

Duration sample_pause(Duration age) {
    return std::clamp<Duration>(age / 60, std::chrono::seconds(1), std::chrono::seconds(15));
}

std::string curve_directory(std::string_view directory, std::string_view run_id) {
    std::string name;
    for (const char c : run_id) {
        const bool is_plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                              (c == '.' && !name.empty());
        name += is_plain ? c : '_';
    }
    return fmt::format("{}/{}", directory, name);
}

JobCurves::JobCurves(os::EventLoop& loop, Inquiry& inquiry, std::string directory, Warn warn)
    : loop_(loop), inquiry_(inquiry), directory_(std::move(directory)), warn_(std::move(warn)) {
    timer_ = loop_.call_after(Duration::zero(), [this] { sample(); });
}

JobCurves::~JobCurves() { loop_.cancel(timer_); }

void JobCurves::sample() {
    const TimePoint now = MonotonicClock::now();
    timer_ = loop_.call_after(sample_pause(now - begun_), [this] { sample(); });
    ControlRequest request{"status", {}};
    if (now >= gpus_due_) {
        request.arguments["gpus"] = "shown";
        gpus_due_ = now + kGpuPause;
    }
    inquiry_.ask_job(request, [this, alive = std::weak_ptr(alive_)](const std::string& answer) {
        if (alive.lock()) take(answer);
    });
}

void JobCurves::take(const std::string& answer) {
    Result<JobStatus> status = job_status_from_json(answer);
    if (!status) return;
    const std::vector<Scalar> scalars = scalars_of(before_ ? &*before_ : nullptr, *status);
    before_ = *std::move(status);
    const os::BlockingCall writes_file(loop_.keepalive());
    warn_once(write(wall_clock(), scalars));
}

void JobCurves::told(std::uint64_t generation, std::string_view lines) {
    if (generation < told_generation_) return;
    const os::BlockingCall writes_file(loop_.keepalive());
    // A file of its own, so that its first point tells where the run goes on.
    if (generation > told_generation_) told_.reset();
    told_generation_ = generation;
    warn_once(write(decode_scalars(lines)));
}

void JobCurves::warn_once(const Status& written) {
    if (written || has_warned_) return;
    has_warned_ = true;
    warn_(fmt::format("--tensorboard: {}; points of curves are lost, the job goes on", written.error().what));
}

Status JobCurves::write(double wall_time, const std::vector<Scalar>& scalars) {
    if (const Status created = create(file_, directory_ + "/ddprun"); !created) return created;
    const double age = std::max(0.0, wall_time - static_cast<double>(file_->first_second()));
    const Status added = file_->add(wall_time, static_cast<std::uint64_t>(age), scalars);
    return added ? file_->flush() : added;
}

/// The numbers of one step become one point.
Status JobCurves::write(const std::vector<ToldScalar>& scalars) {
    if (const Status created = create(told_, directory_); !created) return created;
    std::vector<Scalar> point;
    for (std::size_t i = 0; i < scalars.size(); ++i) {
        const ToldScalar& one = scalars[i];
        point.push_back({one.name, one.value});
        const bool goes_on =
            i + 1 < scalars.size() && scalars[i + 1].step == one.step && scalars[i + 1].time == one.time;
        if (goes_on) continue;
        if (const Status added = told_->add(one.time, one.step, point); !added) return added;
        point.clear();
    }
    return told_->flush();
}

}  // namespace ddprun
