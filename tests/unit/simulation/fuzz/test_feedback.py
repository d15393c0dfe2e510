"""Feedback that is sent again and again while dispatchers die and connections fail counts once, whatever it names. Virtual time."""

from collections import defaultdict
from functools import partial
from typing import Any

from msgspec.structs import replace

from bus.messages.public import Feedback, QueryHead
from services.dispatcher.contexts import read_value
from services.simulation.fuzz.trial import FaultTrial, scenario_of

AGAIN_S = (0.05, 0.4, 3.0, 12.0)


def test_a_feedback_that_comes_again_counts_once_whatever_fails() -> None:
    trial = FaultTrial(scenario_of(2125))  # two dispatchers die, one after the other
    kernel, publish = trial.kernel, trial.kernel.publish
    inputs: list[Any] = []
    sent: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def published(
        subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Any = None
    ) -> None:
        if type(message) is QueryHead and not inputs:
            inputs.append(message.inputs)
        if type(message) is not Feedback or message.query is None:
            publish(subject, message, reply, body, by, headers)
            return
        named = sent[subject.rpartition(".")[2]]
        number = len(named)
        named.add((message.query, message.item))
        if number % 2:
            message = replace(message, retry_key=number.to_bytes(16, "big"))
        if number % 3 == 0:
            message = replace(message, inputs=inputs[0])  # then it counts although its prediction is forgotten
        publish(subject, message, reply, body, by, headers)
        for delay in AGAIN_S[: 1 + number % 4]:
            kernel.at(delay, partial(_call, publish, subject, message))

    kernel.publish = published  # type: ignore[method-assign]
    verdict = trial.verdict()
    assert not [one for one in verdict.violations if one.invariant == "no-error"]
    counted: dict[str, int] = defaultdict(int)
    for key, stored in trial.system._contexts.items():
        value = None if key.endswith(".counted") else read_value(stored.value)
        counted[key.partition(".")[0]] += 0 if value is None else value.n
    assert sum(counted.values()) > 50
    assert all(counted[app] <= len(named) for app, named in sent.items())


def _call(publish: Any, subject: str, message: Any, _: Any) -> None:
    publish(subject, message)
