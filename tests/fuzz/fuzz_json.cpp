#include "env/json.h"
#include "launcher/cli/options.h"
#include "launcher/ends/error_file.h"
#include "launcher/hang/hang_sample.h"
#include "launcher/hang/stacks.h"
#include "launcher/machine/gpu/gpu_usage.h"
#include "launcher/talk/control.h"
#include "launcher/talk/job_status.h"
#include "pbs/qstat.h"
#include "tests/fuzz/mutation.h"

/// Every JSON that ddprun reads of others: configuration files, what running jobs answer, error reports,
/// qstat. A fixed number of mutations from a fixed seed.
namespace ddprun::test {
namespace {

constexpr int kIterations = 20'000, kCommandLines = 4'000;

const std::vector<std::string> kSeeds = {
    "// a job\n{\"nproc-per-node\": 4, \"log_dir\": \"logs\", \"standalone\": true, \"quiet\": false, \"signal\": [\"USR1=stop\"],\n"
    " \"shutdown-timeout\": \"30s\", \"program\": \"train\", \"args\": [\"--epochs\", \"2\"]}",
    R"({"nnodes":"2:4","rdzv-endpoint":"node00:29500","max-restarts":3,"redirects":"0:1,1:2","cpu-bind":"cores"})",
    R"({"request":"signal","signal":"USR1","rank":"3"})",
    R"({"ok":true,"text":"done"})",
    R"({"ok":false,"error":"no"})",
    R"({"ok":true,"job":"5f3a","pid":4171,"generation":2,"seconds":1.5,"hosts":[{"host":"a","pid":1,"gpus":[{"index":0,"uuid":"GPU-a","processes":[{"pid":7,"used_bytes":64}]}]}],"workers":[{"node":0,"rank":1,"gpus":[0,1],"step":5}]})",
    R"({"ok":true,"gpus":[{"index":0,"uuid":"GPU-a","busy_percent":3,"used_bytes":1,"total_bytes":2,"processes":[]}]})",
    R"({"ok":true,"stacks":[{"rank":1,"host":"a","pid":4171,"method":"gdb","text":"Thread 1\n#0 main (x=1) at a.c:7"}]})",
    R"({"ok":true,"generation":3,"is_running":true,"host":"a","ranks":[[5,true,false,17,0,0,true,18446744073709551615,3,1,64]]})",
    R"({"message":{"message":"ValueError: _ZN3ddp4WorkE","extraInfo":{"py_callstack":"#0 _ZN3ddp4waitEv+0x1c","timestamp":"12"}}})",
    R"({"timestamp":1763737000,"Jobs":{"7.pbs":{"Resource_List":{"walltime":"01:00:00"},"resources_used":{"walltime":"00:10:00"},"stime":"Sat Nov 21 14:55:33 2026"}}})",
};

template <class T>
void check(const Result<T>& result) {
    if (!result) check_error(result.error().what);
}

/// What was read must be read again from what is written of it.
void check_json(const std::string& text) {
    const Result<Json> json = parse_json(text, {.unique_names = true});
    if (!json) return check_error(json.error().what);
    const std::string written = to_text(*json);
    const Result<Json> again = parse_json(written, {.unique_names = true});
    if (!again) broken("what was written cannot be read", written);
    if (to_text(*again) != written) broken("a value changed on its way through text", written);
    if (!parse_json(to_text(*json, 2))) broken("an indented text cannot be read", text);
}

void take(const std::string& text) {
    check_json(text);
    check(parse_config(text, "job.json"));
    check(decode_control_request(text));
    check(pbs::parse_qstat(text));
    (void)readable_error_file(text);
    // Their errors may be another ddprun's own words.
    (void)decode_control_text(text);
    (void)job_status_from_json(text);
    (void)answer_from<std::vector<GpuUsage>>(text, "gpus");
    (void)answer_from<NodeLook>(text);
    if (const auto stacks = answer_from<std::vector<RankStack>>(text, "stacks")) (void)render_stacks(*stacks);
}

/// The whole way of --config: every option meets values that nobody types.
void take_as_config(const MemoryFile& place, const std::string& text) {
    place.write(text);
    const auto no_variables = [](std::string_view) -> std::optional<std::string> { return std::nullopt; };
    check(parse_command_line({"--config", place.path(), "program"}, no_variables));
}

int run() {
    std::mt19937 random(20261122);
    const MemoryFile place;
    for (const std::string& seed : kSeeds) take(seed);
    for (int i = 0; i < kIterations; ++i) {
        std::string text = kSeeds[random() % kSeeds.size()];
        mutate(text, kSeeds, random);
        mutate_some(text, kSeeds, random);
        take(text);
    }
    for (int i = 0; i < kCommandLines; ++i) {
        std::string text = kSeeds[random() % 2];
        mutate(text, kSeeds, random);
        take_as_config(place, text);
    }
    fmt::print("fuzz: {} mutated texts taken\n", kIterations + kCommandLines);
    return 0;
}

}  // namespace
}  // namespace ddprun::test

int main() { return ddprun::test::run(); }
