#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/scalar.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Appends curves to a new event file, as TensorBoard reads them: one run is one directory, whose files are
/// read in the order of their names. The first point of a file tells TensorBoard to forget the run's points
/// of earlier files at the same or a later step, so a run that was killed and resumed shows one curve.
///
/// The format: records with masked CRC-32C sums (class RecordWriter in tensorboard/summary/writer/
/// record_writer.py, also "TFRecords format details" at tensorflow.org/tutorials/load_data/tfrecord), each
/// with one Event (tensorboard/compat/proto/event.proto, summary.proto) in protobuf's encoding
/// (protobuf.dev/programming-guides/encoding). The restart: PluginEventAccumulator._MaybePurgeOrphanedData in
/// tensorboard/backend/event_processing/plugin_event_accumulator.py.
///
/// For one thread. Not synced: what flush() has written survives the process, not a power cut.
class CurveFile {
  public:
    /// Creates `directory` where it is missing, and in it the file. Blocks as the file system does. Error:
    /// System ("open DIR/events...: No space left on device").
    static Result<std::unique_ptr<CurveFile>> create(const std::string& directory);
    /// Calls flush() and ignores its error.
    ~CurveFile();
    CurveFile(const CurveFile&) = delete;
    CurveFile& operator=(const CurveFile&) = delete;

    /// Adds a point to each named curve. `wall_time` counts seconds from the epoch. The points wait in memory
    /// until flush(), or until a call that finds the oldest of them a second old, or 64 KiB waiting: then add
    /// writes as flush does, and returns its error.
    Status add(double wall_time, std::uint64_t step, std::span<const Scalar> scalars);
    /// Writes the waiting records by one write(2). Error: System; the waiting points are lost, and the file
    /// ends with a whole record, so that later points can be added.
    Status flush();

    /// The time in the name of the directory's oldest event file, in seconds from the epoch.
    [[nodiscard]] std::uint64_t first_second() const { return first_second_; }

  private:
    CurveFile(std::string path, UniqueFd fd, std::uint64_t first_second)
        : path_(std::move(path)), fd_(std::move(fd)), first_second_(first_second) {}
    void begin(double wall_time, std::uint64_t step);

    std::string path_;
    UniqueFd fd_;
    std::uint64_t first_second_;
    std::string waiting_;       ///< whole records
    double waiting_since_ = 0;  ///< time of the first of them
    std::uint64_t written_ = 0;
    bool has_version_ = false, has_begun_ = false;  ///< among the records, written or waiting
};

/// Appends a record to `out`: the version of the format, which begins a file. Pure, as all below.
void append_version(std::string& out, double wall_time);
/// The run begins or resumes: its next point will be at `step`.
void append_start(std::string& out, double wall_time, std::uint64_t step);
void append_scalars(std::string& out, double wall_time, std::uint64_t step, std::span<const Scalar> scalars);
/// CRC-32C (Castagnoli), without the mask.
std::uint32_t crc32c(std::string_view bytes);

/// The times of a new event file and of the oldest one, among the names in their directory.
struct CurveFileTimes {
    std::uint64_t own = 0;  ///< `now`, or later than every other file's, which may be from a host ahead of us
    std::uint64_t first = 0;  ///< of the oldest, which is the new one where there is no other
};
CurveFileTimes curve_file_times(const std::vector<std::string>& names, std::uint64_t now);

}  // namespace ddprun
