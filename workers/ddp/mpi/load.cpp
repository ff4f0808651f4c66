#include "ddp/mpi/load.h"

#include <fmt/core.h>

#include <system_error>

#include "env/io/file.h"

namespace ddp::mpi {

namespace {

constexpr const char *kOpenMpi = "libddp-mpi-openmpi.so", *kMpich = "libddp-mpi-mpich.so";

}  // namespace

std::vector<std::filesystem::path> module_folders(const std::filesystem::path& here,
                                                  const std::string& libdir, const std::string& programs) {
    const std::filesystem::path beside = here.parent_path();
    std::vector<std::filesystem::path> folders = {here, beside / "lib", beside / "lib64", beside / libdir};
    const std::string own = here.string();
    if (own.ends_with("/" + programs))
        folders.push_back(std::filesystem::path(own.substr(0, own.size() - programs.size())) / libdir);
    return folders;
}

// Only PMI-1's variables indicate MPICH's family: PMIx serves both families, and at most sites only Open MPI
// uses it.
std::vector<std::string> module_names(const ddprun::EnvironmentLookup& lookup,
                                      const std::vector<std::filesystem::path>& folders) {
    const auto is_set = [&](const char* name) { return lookup(name).has_value(); };
    const bool is_pmix = is_set("OMPI_COMM_WORLD_RANK") || is_set("PMIX_RANK");
    const bool is_pmi = is_set("PMI_RANK") || is_set("PALS_RANKID") || is_set("MV2_COMM_WORLD_RANK");
    std::vector<std::string> families = {kOpenMpi, kMpich};
    if (is_pmi && !is_pmix) std::swap(families.front(), families.back());
    std::vector<std::string> names;
    std::error_code none;
    for (const std::string& file : families) {
        for (const auto& folder : folders) {
            if (std::filesystem::exists(folder / file, none)) names.push_back(folder / file);
        }
        names.push_back(file);
    }
    return names;
}

ddprun::Result<OpenedModule> open_likeliest(
    const std::vector<std::string>& names,
    const std::function<ddprun::Result<SharedLibrary>(const std::string& name)>& open) {
    std::string why;
    for (const std::string& name : names) {
        ddprun::Result<SharedLibrary> library = open(name);
        // A family's file is tried in several places.
        const bool is_of_likeliest =
            std::filesystem::path(name).filename() == std::filesystem::path(names.front()).filename();
        if (library) return OpenedModule{*std::move(library), is_of_likeliest ? "" : why};
        if (why.empty()) why = library.error().what;
    }
    return ddprun::Error{ddprun::Errc::NotFound, why};
}

LoadedModule load_module() {
    const std::vector<std::string> names =
        library_names("DDP_MPI_MODULE",
                      module_names(ddprun::process_environment,
                                   module_folders(ddprun::own_directory(), DDP_LIBDIR, DDP_PROGRAMS_DIR)));
    const auto opened = open_likeliest(names, [](const std::string& name) { return open_library({name}); });
    if (!opened) {
        throw InvalidInput(fmt::format(
            "backend mpi: {}: build libddp with -Dmpi=enabled on this machine, or name its module with DDP_MPI_MODULE",
            opened.error().what));
    }
    const SharedLibrary& library = opened->library;
    const Module* (*entry)() = nullptr;
    if (!take(library.resolve, kModuleEntry, entry) || entry()->version != kModuleVersion)
        throw InvalidInput(fmt::format("backend mpi: {} is not of this release of libddp", library.name));
    return {entry(), library.name, opened->passed_over};
}

}  // namespace ddp::mpi
