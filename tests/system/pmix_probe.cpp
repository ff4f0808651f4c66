// A worker that uses PMIx itself. Its first argument chooses what it does:
//   modex     puts a value and gets that of the next rank, without a fence
//   fence     puts a value, enters a fence of all ranks with the values and gets those of all
//   part      the even ranks alone enter a fence, twice
//   widow     rank 1 exits with code 3 before a fence of all, which must end; the others ignore SIGTERM
//   abort     rank 1 calls PMIx_Abort with a message and goes on
//   absent    asks the next rank for a value that it has not put, and the server for publish and spawn
#include <pmix.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

pmix_proc_t self;
std::uint32_t size = 0;

int fail(const char* what, pmix_status_t status) {
    std::fprintf(stderr, "rank %u: %s: %s\n", self.rank, what, PMIx_Error_string(status));
    return 1;
}

pmix_proc_t proc_of(std::uint32_t rank) {
    pmix_proc_t proc = self;
    proc.rank = rank;
    return proc;
}

std::string value_of(std::uint32_t rank) { return "card of " + std::to_string(rank); }

pmix_status_t put_own() {
    const std::string text = value_of(self.rank);
    pmix_value_t value{};
    value.type = PMIX_STRING;
    value.data.string = const_cast<char*>(text.c_str());
    const pmix_status_t put = PMIx_Put(PMIX_GLOBAL, "probe.card", &value);
    return put == PMIX_SUCCESS ? PMIx_Commit() : put;
}

pmix_status_t get_of(std::uint32_t rank, const char* key, std::string& text) {
    const pmix_proc_t proc = proc_of(rank);
    pmix_value_t* value = nullptr;
    const pmix_status_t got = PMIx_Get(&proc, key, nullptr, 0, &value);
    if (got == PMIX_SUCCESS && value->type == PMIX_STRING) text = value->data.string;
    return got;
}

pmix_status_t fence(const std::vector<pmix_proc_t>& procs) {
    pmix_info_t collect{};
    std::strncpy(collect.key, PMIX_COLLECT_DATA, sizeof collect.key - 1);
    collect.value.type = PMIX_BOOL;
    collect.value.data.flag = true;
    return PMIx_Fence(procs.data(), procs.size(), &collect, 1);
}

int get_and_compare(std::uint32_t rank) {
    std::string text;
    const pmix_status_t got = get_of(rank, "probe.card", text);
    if (got != PMIX_SUCCESS) return fail("get", got);
    if (text == value_of(rank)) return 0;
    std::fprintf(stderr, "rank %u: %u has put '%s'\n", self.rank, rank, text.c_str());
    return 1;
}

int run(const std::string& act) {
    if (act == "modex" || act == "fence") {
        if (const pmix_status_t put = put_own(); put != PMIX_SUCCESS) return fail("put", put);
        if (act == "modex") return get_and_compare((self.rank + 1) % size);
        if (const pmix_status_t entered = fence({proc_of(PMIX_RANK_WILDCARD)}); entered != PMIX_SUCCESS)
            return fail("fence", entered);
        for (std::uint32_t rank = 0; rank < size; ++rank) {
            if (get_and_compare(rank) != 0) return 1;
        }
    }
    if (act == "part" && self.rank % 2 == 0) {
        std::vector<pmix_proc_t> even;
        for (std::uint32_t rank = 0; rank < size; rank += 2) even.push_back(proc_of(rank));
        for (int round = 0; round < 2; ++round) {
            if (const pmix_status_t entered = fence(even); entered != PMIX_SUCCESS)
                return fail("fence", entered);
        }
    }
    if (act == "widow") {
        ::signal(SIGTERM, SIG_IGN);
        if (fence({proc_of(PMIX_RANK_WILDCARD)}) != PMIX_SUCCESS) return 1;  // all ignore it now
        if (self.rank == 1) ::_exit(3);
        // The order of two events decides the outcome: a fence does not prove that a rank lives.
        (void)fence({proc_of(PMIX_RANK_WILDCARD)});
        std::printf("rank %u: the fence ended\n", self.rank);
        std::fflush(stdout);
        return 0;
    }
    if (act == "abort" && self.rank == 1) {
        (void)PMIx_Abort(9, "the sea is too rough", nullptr, 0);
        for (;;) ::pause();
    }
    if (act == "absent") {
        if (const pmix_status_t put = put_own(); put != PMIX_SUCCESS) return fail("put", put);
        std::string text;
        const pmix_status_t got = get_of((self.rank + 1) % size, "probe.other", text);
        pmix_info_t info{};
        std::strcpy(info.key, "probe.published");
        info.value.type = PMIX_BOOL;
        const pmix_status_t published = PMIx_Publish(&info, 1);
        std::printf("rank %u: get %s, publish %s\n", self.rank, PMIx_Error_string(got),
                    PMIx_Error_string(published));
        if (got == PMIX_SUCCESS || published == PMIX_SUCCESS) return 1;
        return fence({proc_of(PMIX_RANK_WILDCARD)}) == PMIX_SUCCESS ? 0 : 1;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (const pmix_status_t begun = PMIx_Init(&self, nullptr, 0); begun != PMIX_SUCCESS)
        return fail("init", begun);
    pmix_proc_t job = proc_of(PMIX_RANK_WILDCARD);
    pmix_value_t* value = nullptr;
    if (const pmix_status_t got = PMIx_Get(&job, PMIX_JOB_SIZE, nullptr, 0, &value); got != PMIX_SUCCESS)
        return fail("size", got);
    size = value->data.uint32;
    const int code = argc > 1 ? run(argv[1]) : 0;
    if (code == 0) std::printf("rank %u of %u is done\n", self.rank, size);
    // A rank that exits takes along values that the others may still ask for.
    if (argc > 1 && std::strcmp(argv[1], "modex") == 0) (void)fence({proc_of(PMIX_RANK_WILDCARD)});
    PMIx_Finalize(nullptr, 0);
    return code;
}
