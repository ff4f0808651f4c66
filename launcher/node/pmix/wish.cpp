#include "launcher/node/pmix/wish.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun {
namespace {

/// A structure of the file at an offset; nullopt when it does not lie within the file.
template <class T>
std::optional<T> read_at(std::string_view file, std::uint64_t offset) {
    if (offset > file.size() || file.size() - offset < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, file.data() + offset, sizeof value);
    return value;
}

/// An ELF file of 64 bits in our byte order; empty for any other file.
class ElfFile {
  public:
    explicit ElfFile(std::string_view file) : file_(file) {
        constexpr unsigned char kOurs = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? ELFDATA2LSB : ELFDATA2MSB;
        const std::optional<Elf64_Ehdr> header = read_at<Elf64_Ehdr>(file, 0);
        if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return;
        if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != kOurs) return;
        for (std::uint64_t i = 0; i < header->e_phnum; ++i) {
            const std::optional<Elf64_Phdr> segment =
                read_at<Elf64_Phdr>(file, header->e_phoff + i * sizeof(Elf64_Phdr));
            if (segment) segments_.push_back(*segment);
        }
    }

    [[nodiscard]] std::vector<std::string> needed() const {
        std::vector<std::uint64_t> names;
        std::uint64_t strings = 0;
        for (const Elf64_Phdr& segment : segments_) {
            if (segment.p_type != PT_DYNAMIC) continue;
            for (std::uint64_t at = 0; at < segment.p_filesz; at += sizeof(Elf64_Dyn)) {
                const std::optional<Elf64_Dyn> entry = read_at<Elf64_Dyn>(file_, segment.p_offset + at);
                if (!entry || entry->d_tag == DT_NULL) break;
                if (entry->d_tag == DT_NEEDED) names.push_back(entry->d_un.d_val);
                if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
            }
        }
        std::vector<std::string> result;
        for (const std::uint64_t name : names) {
            if (std::string text = text_at(strings + name); !text.empty()) result.push_back(std::move(text));
        }
        return result;
    }

  private:
    /// The text at an address of the loaded program, as the dynamic section has it; the segments map
    /// addresses to the file.
    [[nodiscard]] std::string text_at(std::uint64_t address) const {
        for (const Elf64_Phdr& segment : segments_) {
            if (segment.p_type != PT_LOAD || address < segment.p_vaddr ||
                address - segment.p_vaddr >= segment.p_filesz)
                continue;
            const std::uint64_t offset = segment.p_offset + (address - segment.p_vaddr);
            if (offset >= file_.size()) return "";
            const std::string_view rest = file_.substr(offset, 4096);
            const std::size_t end = rest.find('\0');
            return end == std::string_view::npos ? "" : std::string(rest.substr(0, end));
        }
        return "";
    }

    std::string_view file_;
    std::vector<Elf64_Phdr> segments_;
};

/// True for MPICH and MPIs of its binary interface, which need PMI, which we do not serve: libmpich.so.12
/// (Debian), libmpi.so.12 (Intel MPI, MVAPICH, MPICH), libmpi_cray.so.12, libmpi_gnu_112.so.12 (Cray),
/// libmpifort.so.12.
bool needs_pmi(const std::string& library) {
    return library.starts_with("libmpich") ||
           (library.starts_with("libmpi") && (library + ".").find(".so.12.") != std::string::npos);
}

std::string mpich_warning(std::string_view how, std::string_view library) {
    return fmt::format(
        "the program {} {} (MPICH or Intel MPI), and ddprun has no PMI for it: each worker is rank 0 of 1; "
        "say mpiexec -n RANKS ddprun --per-rank --pass-mpi-env PROGRAM",
        how, library);
}

/// True for Open MPI, whose sonames are libmpi.so.40, libmpi_mpifh.so.40 and the like, and for PMIx.
bool needs_pmix(const std::string& library) {
    if (needs_pmi(library)) return false;
    return library.starts_with("libmpi.so") || library.starts_with("libmpi_") ||
           library.starts_with("libpmix.so");
}

}  // namespace

std::vector<std::string> needed_libraries(std::string_view file) { return ElfFile(file).needed(); }

std::vector<std::string> needed_libraries_of(const std::string& path) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0)
        return {};
    const auto size = static_cast<std::size_t>(status.st_size);
    // Map the file: a program with its debugging information can have gigabytes, and a few pages are read.
    void* const bytes = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (bytes == MAP_FAILED) return {};
    std::vector<std::string> needed = needed_libraries({static_cast<const char*>(bytes), size});
    ::munmap(bytes, size);
    return needed;
}

PmixWish decide_pmix(PmixUse use, const std::vector<std::string>& needed, bool passes_outer) {
    if (use == PmixUse::Off) return {false, "--pmix off"};
    if (use == PmixUse::On) return {true, "--pmix on"};
    if (passes_outer) return {false, "--pass-mpi-env"};
    for (const std::string& library : needed) {
        if (needs_pmix(library)) return {true, fmt::format("the program is linked with {}", library)};
    }
    const auto other = std::find_if(needed.begin(), needed.end(), needs_pmi);
    if (other == needed.end()) return {false, "the program is not linked with an MPI that speaks PMIx"};
    return {false, "the program is linked with an MPI that speaks PMI",
            mpich_warning("is linked with", *other)};
}

std::string explain_loaded_mpi(std::string_view maps) {
    for (const std::string_view line : split(maps, '\n')) {
        if (line.find('/') == line.npos) continue;
        const std::string library(line.substr(line.rfind('/') + 1));
        if (needs_pmi(library)) return mpich_warning("has loaded", library);
        if (!library.starts_with("libmpi.so")) continue;
        return fmt::format(
            "the program has loaded {}, and there is no PMIx server for it: where it uses MPI, each worker "
            "is rank 0 of 1; say --pmix on",
            library);
    }
    return "";
}

PmixWish decide_pmix(const JobSpec& spec, const std::string& program) {
    const bool is_looked_at = spec.pmix == PmixUse::Auto && !spec.pass_mpi_env;
    return decide_pmix(spec.pmix, is_looked_at ? needed_libraries_of(program) : std::vector<std::string>{},
                       spec.pass_mpi_env);
}

}  // namespace ddprun
