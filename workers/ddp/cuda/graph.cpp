#include "ddp/cuda/graph.h"

#include <cstdint>

namespace ddp::cuda {

Graph::Graph(cudaGraph_t graph) {
    const cudaError_t code = cudaGraphInstantiateWithFlags(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(code, "instantiating a CUDA graph");
}

Graph::~Graph() { cudaGraphExecDestroy(exec_); }

void Graph::launch(Stream stream) const { check(cudaGraphLaunch(exec_, stream), "launching a CUDA graph"); }

Capture::Capture(Stream stream) : stream_(stream) {
    // Restricts only this thread: watchdogs query their events on threads of their own.
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a CUDA stream");
    capturing_ = true;
}

Capture::~Capture() {
    cudaGraph_t graph = nullptr;
    if (!capturing_) return;
    if (succeeded(cudaStreamEndCapture(stream_, &graph)) && graph != nullptr) cudaGraphDestroy(graph);
}

std::unique_ptr<Graph> Capture::end() {
    cudaGraph_t graph = nullptr;
    capturing_ = false;
    check(cudaStreamEndCapture(stream_, &graph), "ending the capture of a CUDA stream");
    return std::make_unique<Graph>(graph);
}

void leave_captures_alone() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    // When even this fails the device is lost, and the thread's next call reports it.
    static_cast<void>(succeeded(cudaThreadExchangeStreamCaptureMode(&mode)));
}

bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    // The default stream (null, or cudaStreamLegacy) cannot be captured, and querying it may fail while
    // another stream is captured.
    if (reinterpret_cast<std::uintptr_t>(stream) <= 1) return false;
    check(cudaStreamIsCapturing(stream, &status), "asking whether a CUDA stream is captured");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace ddp::cuda
