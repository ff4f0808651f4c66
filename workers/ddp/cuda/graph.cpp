#include "ddp/cuda/graph.h"

#include <cstdint>
#include <utility>

#include "ddp/types.h"

namespace ddp::cuda {

Graph::Graph(std::shared_ptr<const Gpu> gpu, GraphHandle graph) : gpu_(std::move(gpu)) {
    const Api& api = gpu_->api();
    const Code code = api.graph_instantiate_with_flags(&exec_, graph, 0);
    api.graph_destroy(graph);
    api.check(code, "instantiating a CUDA graph");
}

Graph::~Graph() { gpu_->api().graph_exec_destroy(exec_); }

void Graph::launch(Stream stream) const {
    gpu_->api().check(gpu_->api().graph_launch(exec_, stream), "launching a CUDA graph");
}

Capture::Capture(std::shared_ptr<const Gpu> gpu, Stream stream) : gpu_(std::move(gpu)), stream_(stream) {
    const Api& api = gpu_->api();
    if (!api.has_graphs()) throw Error(api.library + " cannot capture graphs: CUDA 11.4 or newer is needed");
    // This thread's calls only: watchdogs ask their events on threads of their own.
    api.check(api.stream_begin_capture(stream_, CaptureMode::ThreadLocal), "capturing a CUDA stream");
    capturing_ = true;
}

Capture::~Capture() {
    GraphHandle graph = nullptr;
    if (!capturing_) return;
    if (gpu_->api().succeeded(gpu_->api().stream_end_capture(stream_, &graph)) && graph != nullptr)
        gpu_->api().graph_destroy(graph);
}

std::unique_ptr<Graph> Capture::end() {
    GraphHandle graph = nullptr;
    capturing_ = false;
    gpu_->api().check(gpu_->api().stream_end_capture(stream_, &graph), "ending the capture of a CUDA stream");
    return std::make_unique<Graph>(gpu_, graph);
}

void leave_captures_alone(const Api& api) {
    CaptureMode mode = CaptureMode::ThreadLocal;
    if (!api.has_graphs()) return;
    // Where even this fails the device is lost, and the thread's next call says so.
    static_cast<void>(api.succeeded(api.thread_exchange_stream_capture_mode(&mode)));
}

bool is_capturing(const Api& api, Stream stream) {
    CaptureStatus status = CaptureStatus::None;
    // The default stream (null, or cudaStreamLegacy) cannot be captured, and asking it may be an error while
    // another one is.
    if (reinterpret_cast<std::uintptr_t>(stream) <= 1 || !api.has_graphs()) return false;
    api.check(api.stream_is_capturing(stream, &status), "asking whether a CUDA stream is captured");
    return status != CaptureStatus::None;
}

}  // namespace ddp::cuda
