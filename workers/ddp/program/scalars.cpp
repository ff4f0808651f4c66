#include "ddp/scalars.h"

#include "ddp/types.h"
#include "env/clock.h"
#include "env/io/curve_file.h"

namespace ddp {
namespace {

void keep_first(const ddprun::Status& status, std::string& failure) {
    if (!status && failure.empty()) failure = status.error().what;
}

}  // namespace

Scalars::Scalars(const std::string& directory) {
    ddprun::Result<std::unique_ptr<ddprun::CurveFile>> file = ddprun::CurveFile::create(directory);
    if (!file) throw FileError(file.error().what);
    file_ = *std::move(file);
}
Scalars::~Scalars() = default;
Scalars::Scalars(Scalars&&) noexcept = default;
Scalars& Scalars::operator=(Scalars&&) noexcept = default;

void Scalars::add(std::uint64_t step, std::span<const Scalar> scalars) {
    keep_first(file_->add(ddprun::wall_clock(), step, scalars), failure_);
}

void Scalars::flush() { keep_first(file_->flush(), failure_); }

}  // namespace ddp
