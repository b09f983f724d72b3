"""Capture and replay of decode steps as CUDA graphs: the only part of the engine that a CPU cannot run.

Not yet run on a GPU. The captured work is the padded step of ``stepper``, which a CPU runs and tests without capture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphPool:
    """Graphs of one engine, captured on one stream, with one memory pool for a step's temporary tensors.

    Graphs of a pool must not run at the same time; the model thread replays them one after another. Memory allocated
    during a capture must not be used after the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record ``work`` without running it; return a function that runs it on the current stream.

        ``work`` must have run once before: kernels and library handles are set up on first use, which a capture
        forbids. Other threads may use the device during the capture.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # torch.cuda.graph would also empty the allocator's cache, which takes longer than the capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

        def replay() -> None:
            with torch.cuda.device(self._device):  # the current device is per thread
                graph.replay()

        return replay
