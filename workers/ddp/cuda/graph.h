#pragma once

#include <memory>

#include "ddp/cuda/cuda_api.h"

namespace ddp::cuda {

/// A CUDA graph captured from a stream: each launch repeats it with the same addresses and arguments, so that
/// a training step costs one launch.
class Graph {
  public:
    /// Destroys `graph`. Throws Error.
    explicit Graph(cudaGraph_t graph);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    /// Queues it on `stream`. Does not block.
    void launch(Stream stream) const;

  private:
    cudaGraphExec_t exec_ = nullptr;
};

/// Between construction and end(), work that this thread puts on `stream`, and on streams that wait for its
/// events, is recorded and does not run. Nothing in between may block, allocate or query an event; `stream`
/// must wait for all streams involved before end(). Other threads of the process are not restricted.
///
///     Capture capture(stream);
///     ... one training step ...
///     const std::unique_ptr<Graph> step = capture.end();
///     for each batch: step->launch(stream);
class Capture {
  public:
    /// `stream` may not be the default stream. Throws Error.
    [[nodiscard]] explicit Capture(Stream stream);
    /// Without end() the recording is discarded.
    ~Capture();
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    /// Throws Error with CUDA's reason when a call in between could not be captured.
    [[nodiscard]] std::unique_ptr<Graph> end();

  private:
    Stream stream_;
    bool capturing_ = false;
};

/// For libddp's own threads, once, after they chose a device: their event queries and allocations then do not
/// invalidate a capture of the program, also one in CUDA's default mode, which forbids these calls to every
/// thread. Does not throw.
void leave_captures_alone();

[[nodiscard]] bool is_capturing(Stream stream);

}  // namespace ddp::cuda
