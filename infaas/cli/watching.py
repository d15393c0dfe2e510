"""How far a simulation is, on stderr: a bar on a terminal, else a line for every tenth of a run that takes a while."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infaas.cli.output import progress

Told = Callable[[str, float], None]  # policy, and the scenario's seconds so far

_PATIENCE = 3.0  # s after which those who wait without a terminal are told something


@contextmanager
def watched(policies: Sequence[str], duration_s: float) -> Iterator[Told]:
    """Shows what it is told; leaves a terminal as it was, also after Ctrl-C."""
    if not sys.stderr.isatty():
        yield by_line(policies, duration_s, time.monotonic)
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(policies[0], total=duration_s * len(policies))

        def told(policy: str, at: float) -> None:
            place = policies.index(policy)
            description = policy if len(policies) == 1 else f"{policy} ({place + 1} of {len(policies)})"
            bars.update(bar, description=description, completed=place * duration_s + at)

        yield told


def by_line(policies: Sequence[str], duration_s: float, clock: Callable[[], float]) -> Told:
    """clock: monotonic seconds."""
    began = clock()
    tenths = 0

    def told(policy: str, at: float) -> None:
        nonlocal tenths
        done = (policies.index(policy) + at / duration_s) / len(policies)
        if int(10 * done + 1e-9) <= tenths:
            return
        tenths = int(10 * done + 1e-9)
        seconds = clock() - began
        if seconds >= _PATIENCE and tenths < 10:
            progress(f"{10 * tenths} %: {policy}, {at:.0f} of {duration_s:g} s, after {seconds:.0f} s")

    return told
