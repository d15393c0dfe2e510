"""What `infaas doctor` finds: one line each."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from infaas.cli.output import one_line

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check's result. remedy: what to do; never empty when it failed."""

    check: str
    state: State
    detail: str
    remedy: str = ""

    def to_map(self) -> dict[str, str]:
        """As `--json` prints it."""
        return {"check": self.check, "state": self.state, "detail": self.detail, "remedy": self.remedy}


class Trouble(Exception):
    """A check failed: what is wrong, and what to do."""

    def __init__(self, detail: object, remedy: str) -> None:
        super().__init__(one_line(detail))
        self.remedy = remedy


def examine(check: str, look: Callable[[], str]) -> Finding:
    """Run one check that returns what it saw or raises Trouble."""
    try:
        return Finding(check, "ok", look())
    except Trouble as trouble:
        return Finding(check, "failed", str(trouble), trouble.remedy)


async def examine_soon(check: str, look: Callable[[], Awaitable[str]], timeout: float = 10.0) -> Finding:
    """`examine` for checks that wait; longer than `timeout` seconds is a failure."""
    try:
        return Finding(check, "ok", await asyncio.wait_for(look(), timeout))
    except Trouble as trouble:
        return Finding(check, "failed", str(trouble), trouble.remedy)
    except TimeoutError:
        return Finding(
            check, "failed", f"no reply within {timeout:.0f} s", "look at the load and the logs of that server"
        )
