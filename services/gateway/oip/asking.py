"""What both forms of the protocol, REST and gRPC, do alike: who is meant, what is required, the question, the server's own words."""

from collections.abc import Collection, Iterable
from importlib import metadata as packages
from typing import Any

from infaas.answers import Answer
from infaas.errors import Refused
from services.gateway.door import Door, Problem
from services.gateway.needs import MOST_TEXT, BadParameter, needs_of
from services.gateway.oip import metadata as described
from services.gateway.oip.infer import BadInference, Inference
from services.gateway.oip.names import Target, parse
from services.shell.clock import now

NAME = "infaas"
EXTENSIONS = [
    "modelless",
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
]


def server() -> dict[str, Any]:
    """The server's metadata."""
    return {"name": NAME, "version": _version(), "extensions": EXTENSIONS}


def target_of(name: str, version: str | None) -> Target:
    """Whom a request for a model of this name is for. Raises Problem."""
    found = parse(name, version or None)
    if found is None:
        raise Problem(
            None,
            "no model has such a name: they are <app>, <app>.<model> or <app>.<model>.<variant>, of letters, digits, - and _",
            code="unknown_model",
        )
    return found


def known(door: Door, name: str, target: Target) -> described.Known:
    """What is registered under a name. Raises Problem."""
    found = described.find(door.catalog, target)
    if found is None:
        raise Problem(None, f"no model {name[:80]!r} is registered", code="unknown_model")
    return found


async def ask(
    door: Door,
    target: Target,
    asked: Inference,
    *,
    protocol: str,
    traceparent: str | None = None,
    deadline: float | None = None,
) -> Answer:
    """The answer to a request. deadline: Unix seconds after which its sender does not wait any more.

    Raises Refused, Problem, and for what is wrong with the request BadInference, BadParameter.
    """
    app = door.catalog.app(target.app)
    if asked.outputs is not None and app is not None and app.signature is not None:
        _check_outputs(asked.outputs, [spec.name for spec in app.signature.outputs])
    needs = _needs(target, asked)
    if deadline is not None:
        needs["deadline"] = min(deadline, needs.get("deadline", deadline))
    answer = await door.ask(target.app, asked.inputs, needs, traceparent=traceparent, protocol=protocol)
    if isinstance(answer, Refused):
        raise answer
    if asked.outputs is not None:
        if answer.default and not asked.outputs.keys() <= answer.tensors.keys():
            text = f"the app's default output is one of {', '.join(answer.tensors)} only; {answer.reason}"
            raise Problem(None, text, code="deadline")
        _check_outputs(asked.outputs, answer.tensors)
    return answer


def _needs(target: Target, asked: Inference) -> dict[str, Any]:
    needs = needs_of(asked.parameters, now()) if asked.parameters else {}
    for name, value in target.needs().items():
        if needs.get(name, value) != value:
            raise BadParameter(f"parameters.{name} is {needs[name][:80]!r}, but the model's name says {value!r}")
        needs[name] = value
    if asked.id is not None:
        if len(asked.id) > MOST_TEXT:
            raise BadInference(f"id may have {MOST_TEXT} characters, not {len(asked.id)}")
        needs["id"] = asked.id
    return needs


def _check_outputs(wanted: Iterable[str], names: Collection[str]) -> None:
    for name in wanted:
        if name not in names:
            raise BadInference(f"outputs.{name[:80]}: the model has {', '.join(names)}")


def _version() -> str:
    try:
        return packages.version("infaas")
    except packages.PackageNotFoundError:
        return "0"
