"""The hands of a real accelerator: those of any device, except that memory is the device's own, and that its faults are final."""

import logging
import os
from typing import Any

from services.executor.edge import ExecutorEdge
from services.executor.work import BatchResult, LoadedModel, LoadModel, MeasureMemory

log = logging.getLogger(__name__)

BROKEN = 72  # exit code: the device refuses all further work of this process
# After these the CUDA context is lost: every later call of the process fails, whatever model it is for.
_FINAL = ("illegal memory access", "unspecified launch failure", "device-side assert", "uncorrectable ECC error")


class AcceleratedEdge(ExecutorEdge):
    """One GPU's or Neuron chip's edge."""

    def inline(self, command: Any) -> Any:
        return _whole(super().inline(command))

    async def perform(self, command: Any) -> Any:
        if isinstance(command, MeasureMemory):
            return sum(held.handle.memory_mb for held in self._held.values())
        result = _whole(await super().perform(command))
        if isinstance(command, LoadModel) and isinstance(result, LoadedModel):
            held = self._held.get(command.instance)
            memory_mb = held.handle.memory_mb if held is not None else 0.0
            return LoadedModel(result.load_ms, memory_mb, result.proof)
        return result


def final(result: Any) -> str:
    """The error after which the device serves this process no more; empty when there was none."""
    errors = result.errors if isinstance(result, BatchResult) else None
    return next((error for error in errors or () if any(words in error for words in _FINAL)), "")


def _whole(result: Any) -> Any:
    """The result; a process whose device is lost ends, and is started again."""
    error = final(result)
    if error:
        log.critical("the device is lost to this process, which stops and will be started again: %s", error)
        os._exit(BROKEN)
    return result
