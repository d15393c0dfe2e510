"""Sends digits at given times, whatever the answers do, and keeps what became of each query.

Latency counts from the moment when a query should have been sent, so a generator that is late makes nothing look better.
"""

import time
from collections.abc import Sequence
from itertools import cycle

import rig
from msgspec import Struct

import infaas
from infaas.answers import Answer
from infaas.demo import digits as data
from infaas.errors import InfaasError, Refused

PATIENCE = 5.0  # s beyond the objective for which a reply is waited for


class Sent(Struct, frozen=True):
    """One query. at: seconds from the start of the load when it should have been sent; took: from then to the reply.

    code: "" for an answer, else of the refusal, or "failed". late_send: how late the generator was. right: whether the class is
    the label's; None where nobody computed it (a simulated device that is faster than the CPU gives zeros).
    """

    at: float
    took: float
    late_send: float
    code: str = ""
    variant: str = ""
    hardware: str = ""
    simulated: bool = False
    accuracy: float = 0.0
    cost: float = 0.0
    right: bool | None = None


async def send(
    client: infaas.Client, app: str, times: Sequence[float], *, latency_ms: float, accuracy: float
) -> tuple[float, list[Sent]]:
    """One digit a query at each of `times` (s, ascending); returns the Unix time of second 0, and every query's end."""
    digits = data.load(data.UNSEEN)
    prepared = [
        await client.prepare(app, digits.x[i : i + 1], latency_ms=latency_ms, accuracy=accuracy, timeout=PATIENCE)
        for i in range(len(digits))
    ]
    turn, unix, begin = cycle(range(len(digits))), time.time(), time.monotonic()

    async def one(due: float) -> Sent:
        which, late = next(turn), time.monotonic() - due
        try:
            reply = await client.ask(prepared[which], raise_refused=False)
        except InfaasError:
            return Sent(due - begin, time.monotonic() - due, late, code="failed")
        took = time.monotonic() - due
        if isinstance(reply, Refused):
            return Sent(due - begin, took, late, code=reply.code)
        return _answered(reply, due - begin, took, late, int(digits.y[which]))

    return unix, await rig.paced(times, one)


def _answered(reply: Answer, at: float, took: float, late: float, label: int) -> Sent:
    scores = next(iter(reply.outputs.values()))
    return Sent(
        at,
        took,
        late,
        variant=reply.variant,
        hardware=reply.hardware,
        simulated=reply.simulated,
        accuracy=reply.accuracy or 0.0,
        cost=reply.cost,
        right=bool(scores[0].argmax() == label) if scores.any() else None,
    )
