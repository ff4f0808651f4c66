#include "launcher/output/attempt_files.h"

#include <fmt/core.h>

#include <utility>

#include "env/io/file.h"

namespace ddprun {
namespace {

const char* file_name(Streams stream) { return stream == Streams::Out ? "stdout.log" : "stderr.log"; }

}  // namespace

Status AttemptFiles::begin(int attempt) {
    for (LogWriter::Handle* file : {&filtered_out_, &filtered_err_}) {
        if (*file) writer_.close(std::exchange(*file, nullptr));
    }
    directory_.clear();
    if (spec_.log_dir.empty()) return {};
    std::string directory = fmt::format("{}/attempt_{}", spec_.log_dir, attempt);
    if (Status made = make_directories(directory); !made) return made;
    directory_ = std::move(directory);
    return {};
}

Status AttemptFiles::make_rank_directory(const StreamOwner& owner) const {
    if (directory_.empty()) return {};
    return make_directories(fmt::format("{}/{}", directory_, owner.rank));
}

std::string AttemptFiles::path_of(const StreamOwner& owner, Streams stream) const {
    return fmt::format("{}/{}/{}", directory_, owner.rank, file_name(stream));
}

Result<LogWriter::Handle> AttemptFiles::open(const std::string& path) {
    Result<LogFile> opened = LogFile::open(path, spec_.max_file_bytes);
    if (!opened) return opened.error();
    return writer_.add(*std::move(opened));
}

Result<LogWriter::Handle> AttemptFiles::filtered(Streams stream) {
    if (filters_of(spec_, stream).empty() || directory_.empty()) return LogWriter::Handle();
    LogWriter::Handle& file = stream == Streams::Out ? filtered_out_ : filtered_err_;
    if (file) return file;
    Result<LogWriter::Handle> opened = open(fmt::format("{}/filtered_{}", directory_, file_name(stream)));
    if (opened) file = *opened;
    return opened;
}

}  // namespace ddprun
