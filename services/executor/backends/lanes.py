"""The CUDA stream of one model: what is queued on it runs in order, beside those of other models, and is recorded into graphs.

This file has never been executed on a GPU by its authors; `pytest -m gpu tests/gpu` does it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Compute = Callable[[], list[Any]]


class Lane(Protocol):
    """device: a torch.device. pinned: whether host memory for it is to be page-locked."""

    device: Any
    pinned: bool

    def on(self) -> Any:
        """A context in which operators are queued here, without gradients. Of any thread, one at a time."""

    def capture(self, compute: Compute) -> tuple[Callable[[], None], list[Any]]:
        """Record what `compute` queues: how to queue it again, and its outputs, the same memory each time."""

    def settle(self) -> None:
        """Wait until all that was queued is done; other threads go on meanwhile."""

    def trim(self) -> None:
        """Give memory that nothing uses any more back to the device."""


class CudaLane:
    """A stream of its own on one GPU."""

    pinned = True

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device)
        self._done = torch.cuda.Event(blocking=True)  # waiting must not spin: the cores are others'
        torch.cuda.synchronize(self.device)  # weights were moved on another stream, which this one does not wait for
        self._pool: Any = None  # all graphs share their scratch memory: one replays at a time

    @contextmanager
    def on(self) -> Iterator[None]:
        torch = self._torch
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.inference_mode():
            yield

    def capture(self, compute: Compute) -> tuple[Callable[[], None], list[Any]]:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        # Other models may run on other streams meanwhile: only this thread's calls count as wrong.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, outputs

    def settle(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def trim(self) -> None:
        with self._torch.cuda.device(self.device):
            self._torch.cuda.empty_cache()
