"""PyTorch's TCPStore, its client against its server in a process of its own: times of one client."""

import datetime
import multiprocessing
import statistics
import time

import torch.distributed as dist

OPERATIONS = 10_000


def serve(ready, over):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready.put(store.port)
    over.wait()


def client(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


def median_us(operation):
    samples = []
    for _ in range(OPERATIONS):
        start = time.perf_counter_ns()
        operation()
        samples.append(time.perf_counter_ns() - start)
    return statistics.median(samples) / 1000


if __name__ == "__main__":
    ready, over = multiprocessing.Queue(), multiprocessing.Event()
    server = multiprocessing.Process(target=serve, args=[ready, over])
    server.start()
    port = ready.get()
    store = client(port)
    store.set("key", "v" * 32)
    print("PyTorch's TCPStore, 1 client, median us")
    # A set is not acknowledged: the get behind it is what waits for it.
    print(f"get {median_us(lambda: store.get('key')):.1f}, add {median_us(lambda: store.add('n', 1)):.1f}, "
          f"check {median_us(lambda: store.check(['key'])):.1f}")
    over.set()
    server.join()
