#pragma once

#include <memory>

#include "ddp/cuda/cuda_api.h"

namespace ddp::cuda {

/// Work that was captured from a stream and is launched again as a whole, with the same addresses and
/// arguments: a training step costs one launch.
class Graph {
  public:
    /// Destroys `graph`. Throws Error.
    explicit Graph(cudaGraph_t graph);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    /// Runs it in the order of `stream`. Does not block.
    void launch(Stream stream) const;

  private:
    cudaGraphExec_t exec_ = nullptr;
};

/// Between construction and end() what this thread gives to `stream`, and to streams that wait for its
/// events, is recorded and does not run. Nothing in between may block, allocate or ask an event; streams that
/// were drawn in must be waited for again before end(). Other threads of the process are not restricted.
///
///     Capture capture(stream);
///     ... one training step ...
///     const std::unique_ptr<Graph> step = capture.end();
///     for each batch: step->launch(stream);
class Capture {
  public:
    /// `stream` may not be the default stream. Throws Error.
    [[nodiscard]] explicit Capture(Stream stream);
    /// Without end(): what was recorded is thrown away.
    ~Capture();
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    /// Throws Error with CUDA's reason when something in between could not be captured.
    [[nodiscard]] std::unique_ptr<Graph> end();

  private:
    Stream stream_;
    bool capturing_ = false;
};

/// For threads of libddp's own, once, behind their choice of a device: what they ask of events and allocate
/// does not spoil a capture that the program makes meanwhile, also one in CUDA's default mode, which forbids
/// it to every thread. Does not throw.
void leave_captures_alone();

/// Whether `stream` is being captured now.
[[nodiscard]] bool is_capturing(Stream stream);

}  // namespace ddp::cuda
