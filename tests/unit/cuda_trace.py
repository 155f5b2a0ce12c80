"""Chrome traces as torch.profiler writes them on CUDA, with the fields that Kineto gives each kind
of event (``libkineto/src/CuptiActivity.cpp``)."""

from __future__ import annotations

from typing import Any

from onelaunch.tools.bench.trace import CALL

PID, THREAD, STREAM = 1147039, 1147039, 7
Json = dict[str, Any]


def host(category: str, name: str, ts: float, dur: float, **args: Any) -> Json:
    """An event of the host: an operator, an annotation, or a call into CUDA."""
    row = {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": THREAD, "ts": ts}
    return {**row, "dur": dur, "args": args}


def operator(name: str, ts: float, dur: float, number: int) -> Json:
    external = {"External id": number, "Record function id": 0, "Ev Idx": number}
    return host("cpu_op", name, ts, dur, **external)


def runtime(name: str, ts: float, dur: float, number: int = 0, correlation: int = 0) -> Json:
    args = {"External id": number, "cbid": 211, "correlation": correlation}
    return host("cuda_runtime", name, ts, dur, **args)


def gpu(category: str, name: str, ts: float, dur: float, number: int, correlation: int) -> Json:
    args: Json = {"External id": number, "device": 0, "context": 1, "stream": STREAM}
    args["correlation"] = correlation
    if category == "kernel":
        args |= {"queued": 0, "registers per thread": 32, "grid": [8, 1, 1], "block": [128, 1, 1]}
    else:
        args |= {"bytes": 4, "memory bandwidth (GB/s)": 0.0025}
    row = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": STREAM, "ts": ts, "dur": dur}
    return {**row, "args": args}


def call(ts: float, dur: float) -> Json:
    return host("user_annotation", CALL, ts, dur, **{"External id": 1, "Ev Idx": 0})


def flow(ts: float, correlation: int) -> list[Json]:
    """The arrow from a launch to its kernel, and other rows that are no work."""
    arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": PID, "tid": THREAD, "ts": ts}
    return [
        {"ph": "s", **arrow},
        {"ph": "f", **arrow, "pid": 0, "tid": STREAM, "bp": "e"},
        {"ph": "M", "name": "process_name", "ts": ts, "pid": PID, "tid": 0, "args": {}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": ts},
    ]


SGEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(Params)"
RELU = "void at::native::vectorized_elementwise_kernel<4, clamp_scalar>(int, Op, std::array)"


def eager(begin: float = 1000.0) -> list[Json]:
    """A call of 100 us: an addmm of 20 us, a relu of 4 us, and an `.item()` that waits 30 us."""
    return [
        call(begin, 100.0),
        # The GPU's side of an annotation lies over its kernels, and is no work.
        gpu("gpu_user_annotation", CALL, begin + 15, 55.0, 1, 0),
        operator("aten::linear", begin + 2, 28.0, 2),
        operator("aten::addmm", begin + 4, 24.0, 3),
        runtime("cudaLaunchKernel", begin + 10, 6.0, 3, 11),
        gpu("kernel", SGEMM, begin + 15, 20.0, 3, 11),
        operator("aten::relu", begin + 32, 12.0, 4),
        runtime("cudaLaunchKernel", begin + 36, 5.0, 4, 12),
        gpu("kernel", RELU, begin + 42, 4.0, 4, 12),
        operator("aten::item", begin + 50, 44.0, 5),
        operator("aten::_local_scalar_dense", begin + 52, 41.0, 6),
        runtime("cudaMemcpyAsync", begin + 54, 28.0, 6, 13),
        gpu("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", begin + 68, 2.0, 6, 13),
        runtime("cudaStreamSynchronize", begin + 84, 2.0, 6, 14),
        {
            **gpu("cuda_sync", "Stream Sync", begin + 84, 2.0, 6, 14),
            "args": {"cuda_sync_kind": "Stream Sync", "stream": 7, "correlation": 14},
        },
        runtime("cudaDeviceSynchronize", begin + 104, 3.0, 0, 15),  # after the call
        *flow(begin + 10, 11),
    ]


def graphed(launch: bool, begin: float = 1000.0) -> list[Json]:
    """A replay of 12 us: by the runtime, which shows as a launch, or by the driver, which does
    not."""
    name = "onelaunch replay: model (8, 64)"
    rows = [
        call(begin, 12.0),
        host("user_annotation", name, begin + 3, 7.0, **{"External id": 2, "Ev Idx": 1}),
        gpu("gpu_user_annotation", name, begin + 9, 25.0, 2, 0),
        gpu("kernel", SGEMM, begin + 9, 20.0, 0, 21),
        gpu("kernel", RELU, begin + 29, 4.0, 0, 21),
        gpu("gpu_memset", "Memset (Device)", begin + 33, 1.0, 0, 21),
    ]
    return rows + [runtime("cudaGraphLaunch", begin + 4, 5.0, 2, 21)] * launch
