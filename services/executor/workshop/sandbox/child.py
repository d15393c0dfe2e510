"""The untrusted child: one task, then frames until it is done (services/shell/child.py). The supervisor starts it, or has a process copy itself
that has imported torch and touches no upload.
"""

import gc
import os
import select
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from bus.messages.catalog import METRICS
from services.executor.backends.base import LoadFailed, plain, trim_memory
from services.executor.backends.functions import NO_LANDLOCK, FunctionProcess
from services.executor.workshop.sandbox.lockdown import die_with, lock_down
from services.executor.workshop.sandbox.protocol import (
    BuildTask,
    CascadeTask,
    Frame,
    InspectTask,
    MeasureTask,
    Probed,
    ProbeTask,
    SandboxInput,
    SandboxTask,
    Step,
    TaskRefused,
    UploadRejected,
)
from services.shell.child import Channel


def copied(orders: socket.socket) -> None:
    """Import torch and make a copy of this process for each task that is ordered, one after the other. Only copies return."""
    from services.executor.workshop.tasks import build, profiling, torch_files  # noqa: F401, PLC0415

    _import(USED)
    later = list(USED_LATER)
    gc.collect()
    trim_memory()
    gc.freeze()
    ours = os.getpid()
    while True:
        while later and not select.select([orders], [], [], 0.0)[0]:
            _import((later.pop(0),))
        message, fds, _, _ = socket.recv_fds(orders, 16, 1)
        if not message:
            os._exit(0)
        if (pid := os.fork()) == 0:
            die_with(ours)
            orders.close()
            os.setsid()
            for number in (0, 1):
                os.dup2(fds[0], number)
            os.close(fds[0])
            return
        os.close(fds[0])
        orders.send(b"%d" % pid)
        while later and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            _import((later.pop(0),))
        orders.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


USED = (
    "torch.export.pt2_archive._package",
    "torch._export.serde.serialize",
    "torch.fx.experimental.validator",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "networkx",
)
USED_LATER = (  # by builds alone: imported before the first order, if that takes its time, or while the first copy inspects
    "onnxscript",
    "torch.onnx._internal.exporter._core",
    "onnxscript.function_libs.torch_lib.ops",
)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):
            import_module(name)


def main() -> int:
    """Do the task. The exit code is 0 once the last frame is written, also if that is a refusal."""
    channel = Channel.of_child()
    import_module("numpy")  # whatever the task is
    order = channel.received(SandboxInput)
    scratch = Path(order.task.scratch)
    os.chdir(scratch)
    os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), str(scratch)))
    tempfile.tempdir = str(scratch)
    task = order.task
    tell = channel.send
    try:
        process = _functions(task)
    except LoadFailed as error:
        tell(TaskRefused(reason=str(error)))
        return 0
    missing = lock_down(order.limits, scratch, _uploads(task))
    if missing:
        print(f"sandbox without {', '.join(missing)}", file=sys.stderr)
    try:
        _check(task, missing)
        _work(order, tell, process)
    except UploadRejected as refusal:
        tell(TaskRefused(reason=str(refusal)))
    except MemoryError:
        tell(
            TaskRefused(reason=f"the model needs more than the {order.limits.memory_bytes >> 20} MB of memory allowed")
        )
    except Exception as error:
        tell(TaskRefused(reason=f"the model could not be processed: {plain(error)}"))
    return 0


def _check(task: SandboxTask, missing: list[str]) -> None:
    """Raises UploadRejected where a function of the user's own would run unprotected."""
    if "landlock" in missing and not isinstance(task, ProbeTask) and task.data.metric not in METRICS:
        raise UploadRejected(f"metric {task.data.metric}: {NO_LANDLOCK}")


def _functions(task: SandboxTask) -> FunctionProcess | None:
    """The process of the model's functions, which locks itself; this one may start none later. Raises LoadFailed."""
    if isinstance(task, ProbeTask) or task.functions is None:
        return None
    process = FunctionProcess(task.functions)
    process.open(here=True)  # a process of several threads gets no namespaces
    return process


def _work(order: SandboxInput, tell: Callable[[Frame], None], process: FunctionProcess | None) -> None:
    task = order.task
    # Each task imports only what it needs: a profile must not include the quantiser's memory.
    if isinstance(task, InspectTask):
        from services.executor.workshop.tasks.inspection import inspect  # noqa: PLC0415

        tell(inspect(task, tell, process))
    elif isinstance(task, BuildTask):
        from services.executor.workshop.tasks.build import build  # noqa: PLC0415

        build(task, tell, process)
    elif isinstance(task, MeasureTask):
        from services.executor.workshop.tasks.profiling import independence, profile  # noqa: PLC0415

        measured = profile(task, tell, process)
        tell(measured)
        if task.score:
            what = f"{task.artifact.framework} {task.artifact.precision}"
            tell(Step(step=f"asking {what} alone and in batches", progress=1.0, within=30.0))
            tell(independence(task, int(max(measured.memory_mb, default=1)), process))
    elif isinstance(task, CascadeTask):
        from services.executor.workshop.tasks.build import cascade  # noqa: PLC0415

        cascade(task, tell)
    elif isinstance(task, ProbeTask):
        from services.executor.backends import names_for, survey  # noqa: PLC0415

        tell(Step(step=f"looking at {task.device}"))
        tell(Probed(frameworks=survey(task.device, names_for(task.hardware))))


def _uploads(task: SandboxTask) -> tuple[str, ...]:
    """The files of this task that come from outside."""
    if isinstance(task, ProbeTask):
        return ()
    if isinstance(task, CascadeTask):
        return (task.data.path, *(path for pair in task.pairs for path in (pair.first, pair.then)))
    return (task.data.path,) if isinstance(task, MeasureTask) else (task.data.path, task.model)


if __name__ == "__main__":
    parent, *more = sys.argv[1:]
    die_with(int(parent))
    for found in more:
        copied(socket.socket(fileno=int(found)))
    code = main()
    sys.stderr.flush()
    os._exit(code)  # to take torch apart takes a second
