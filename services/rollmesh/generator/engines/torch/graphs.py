"""Capture and replay of decode steps as CUDA graphs: the one part of the engine that a CPU cannot run.

Not yet run on a GPU. What is captured is the padded step of ``stepper``, which a CPU runs and tests without capture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphPool:
    """All graphs of one engine: captured on one stream, with one pool for what a step allocates in between.

    Graphs of a pool must not run at the same time; a model thread replays one after another. Nothing that outlives a
    step may be allocated while it is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record ``work`` without executing it; the result executes it on the stream that is current then.

        ``work`` must have run once before: kernels and library handles are set up on first use, which a capture
        forbids. Other threads may go on using the device.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # torch.cuda.graph would also empty the allocator's cache, which costs more than the capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

        def replay() -> None:
            with torch.cuda.device(self._device):  # another thread's current device says nothing about this one's
                graph.replay()

        return replay
