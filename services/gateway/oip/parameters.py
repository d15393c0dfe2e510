"""A request's parameters as requirements of the query, and the answer's as parameters of the reply. Pure.

Parameters are the fields of a query's `Requirements` (contract, section 6), and metrics by name, as in `mae`. `priority` and `timeout` mean what they mean to Triton: 1 is
the highest priority and 0 the default; microseconds that the request may take, 0 for no limit, in place of a deadline.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bus.fields import fields_of, near
from bus.messages.catalog import METRICS
from bus.messages.public import Requirements
from infaas.answers import Answer
from services.gateway.errors import BadRequest

NEEDS = {name: field for name, field in fields_of(Requirements).items() if name != "deadline"}
NAMES = (*NEEDS, "timeout")
MAX_TIMEOUT_US = 2**53  # longer timeouts mean none
# Parameters to which Triton gives a meaning that is not offered here. Clients may send any other parameter.
RESERVED = {
    "sequence_id": "sequences of requests are not offered",
    "sequence_start": "sequences of requests are not offered",
    "sequence_end": "sequences of requests are not offered",
    "headers": "headers are not passed to models",
}
_READ_ELSEWHERE = ("binary_data_output",)  # by infer.py
_SCALARS = (str, int, float, bool)


def requirements_of(parameters: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The requirements as the client library takes them. now: Unix seconds. Raises BadRequest."""
    requirements: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in NEEDS:
            if (need := _need(name, value)) is not None:
                requirements[name] = need
        elif name in METRICS:
            requirements[name] = _number(name, value)
        elif name == "timeout":
            timeout = _whole(name, value)
            if timeout < 0:
                raise BadRequest(f"parameters.timeout must be in microseconds, at least 0, not {timeout}")
            if 0 < timeout < MAX_TIMEOUT_US:
                requirements["deadline"] = now + timeout / 1e6
        elif name in RESERVED or name.startswith("triton_"):
            if value not in (0, "", False):
                raise BadRequest(f"parameters.{name}: {RESERVED.get(name, 'it is reserved for Triton')}")
        elif name not in _READ_ELSEWHERE and (need := near(name, NAMES)):
            raise BadRequest(f"parameters.{name[:80]} is unknown: did you mean {need}?")
        elif not isinstance(value, _SCALARS):
            raise BadRequest(f"parameters.{name} must be a text, a number, true or false")
    return requirements


def _need(name: str, value: Any) -> Any:
    """The value of a requirement; None where the parameter says nothing, as Triton's 0 and "" do. Raises BadRequest."""
    kind, rule = NEEDS[name].type, NEEDS[name].rule
    value = _READ[kind](name, value)
    if value == "" or (kind is int and value == 0):
        return None
    wrong = None if rule is None else rule.refuse(value)
    if wrong is not None:
        raise BadRequest(f"parameters.{name} {wrong}")
    return value


def misplaced_need(name: str) -> str:
    """A sentence about a field of a request that is meant as a requirement; "" when it is not."""
    need = near(name, NAMES)
    return f'{name[:80]} is not read beside parameters: give {{"parameters": {{"{need}": ...}}}}' if need else ""


def ignored(parameters: Mapping[str, Any]) -> str:
    """Names of the parameters that are not read, separated by commas. The reply shows them, so that misspelt ones are noticed."""
    return ",".join(
        name
        for name in parameters
        if name not in NAMES and name not in METRICS and name not in _READ_ELSEWHERE and name not in RESERVED
    )


MOST_CLASSES = 100  # that an answer names; the metadata names all


def joined(names: Sequence[str]) -> str:
    """Names as one text, which is all that a parameter holds: with commas between them, or as a JSON list where one has a comma."""
    return json.dumps(names, ensure_ascii=False) if any("," in name for name in names) else ",".join(names)


_OF_ANSWER = (
    "model", "variant", "hardware", "accuracy", "latency_ms", "queue_ms", "compute_ms", "batch", "cost", "cached", "simulated",
)  # fmt: skip


def parameters_of(answer: Answer, classes: Sequence[str] = ()) -> dict[str, Any]:
    """The reply's parameters; those that do not apply are left out. classes: of the app, in the order of its scores.

    missed, members, confidences: separated by commas; labels (each item's class), classes: as `joined`.
    """
    found: dict[str, Any] = {name: getattr(answer, name) for name in _OF_ANSWER}
    found["missed"] = ",".join(answer.missed)
    if answer.accuracy is None:
        del found["accuracy"]
    if answer.labels is not None:
        found["labels"] = joined(answer.labels)
        if 0 < len(classes) <= MOST_CLASSES:
            found["classes"] = joined(classes)
    for name in ("query", "confidence", "missing", "default", "reason", "target", "unit", "metric"):
        value = getattr(answer, name)
        if value is not None:
            found[name] = value
    if answer.members is not None:
        found["members"] = ",".join(answer.members)
    if answer.confidences is not None:
        found["confidences"] = ",".join(f"{share:.4g}" for share in answer.confidences)
    return found


def _number(name: str, value: Any) -> float:
    """A number, or a text with one: the parameters of some clients have no type for fractions."""
    if not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise BadRequest(f"parameters.{name} must be a number, not {_shown(value)}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(str(value)) if isinstance(value, str) else _no_whole(name, value)
    except ValueError:
        return _no_whole(name, value)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise BadRequest(f"parameters.{name} must be a text, not {_shown(value)}")


_READ: Mapping[Any, Callable[[str, Any], Any]] = {float: _number, int: _whole, str: _text}


def _no_whole(name: str, value: Any) -> int:
    raise BadRequest(f"parameters.{name} must be a whole number, not {_shown(value)}")


def _shown(value: Any) -> str:
    return (repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))[:40]
