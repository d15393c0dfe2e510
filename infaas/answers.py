"""Replies as callers get them: answers with numpy outputs, refusals, explanations."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from bus.codec import DECODE_ERRORS, explain
from bus.messages.catalog import in_metric
from bus.messages.public import ObjectRef, Tensor, TensorView
from bus.tensors import BadTensor, to_array
from infaas.errors import InfaasError, Refused

if TYPE_CHECKING:
    from bus.tensors import Array


SHOWN = 5  # classes or numbers, in words


class Answer(Struct, frozen=True, kw_only=True, dict=True):
    """The answer to a query (docs/contract.md, section 2). Latencies in ms, cost in US$ of this query.

    accuracy: of the variant, by accuracy_source: "registered", as measured at registration, or "labels" or "reference", as found in production. missed: those of latency, accuracy, cost and confidence that were not met.
    batch: items in the batch that computed the answer. Fields with a default are set only if they apply. query: name of this query,
    for feedback. Of an app with several models: members: `model@version` of those whose output is in the answer; missing: how many of
    the asked ones are not; confidence: the share of the asked ones that agree, confidences: of each item.
    labels: the name of each item's class, if the model was registered with names of its classes. target, unit: what a regressor's numbers
    are, as given at registration. metric: that `accuracy` counts for, where it is no share of right answers; `quality` says it in words.
    """

    id: str | None
    model: str
    version: str
    variant: str
    hardware: str
    worker: str
    accuracy: float | None
    latency_ms: float
    queue_ms: float
    compute_ms: float
    batch: int
    cached: bool
    simulated: bool
    cost: float
    missed: list[str]
    tensors: dict[str, TensorView | list[Any]] = field(name="outputs", default_factory=dict)
    outputs_ref: ObjectRef | None = None
    confidence: float | None = None
    members: list[str] | None = None
    missing: int | None = None
    default: bool | None = None
    reason: str | None = None
    query: str | None = None
    confidences: list[float] | None = None
    labels: list[str] | None = None
    target: str | None = None
    unit: str | None = None
    metric: str | None = None
    accuracy_source: str = "registered"

    def __repr__(self) -> str:
        """Two lines: what is answered, and by whom, at what price."""
        who = self.variant or ", ".join(self.members or ()) or "the app's default"
        named = [self.quality] * bool(self.quality)
        if self.confidence is not None:
            named.append(f"confidence {self.confidence:.4g}")
        missed = [f"missed {', '.join(self.missed)}"] * bool(self.missed)
        about = [f"{self.latency_ms:.3g} ms", *named, f"US$ {1000 * self.cost:.3g} per 1,000", *missed]
        return f"Answer: {self.words()}\nby {who}: {'; '.join(about)}"

    @property
    def quality(self) -> str:
        """The accuracy in its metric: "accuracy 0.97", "mae 43.2 EUR"; empty: nobody has measured it."""
        return "" if self.accuracy is None else in_metric(self.accuracy, self.metric or "top1", self.unit or "")

    def words(self) -> str:
        """What is answered, in the words of the model's owner: classes, or numbers with their unit; of many items the first."""
        if self.labels is not None:
            return ", ".join(self.labels[:SHOWN]) + ", …" * (len(self.labels) > SHOWN)
        parts = []
        for name, array in self.outputs.items():
            flat, what = array.reshape(-1), self.target or name
            figures = [f"{one:.6g}" if isinstance(one, float) else str(one) for one in flat[:SHOWN].tolist()]
            shape = f" {array.dtype}{list(array.shape)}" * (flat.size > SHOWN)
            parts.append(
                f"{what} {', '.join(figures)}{', …' * (flat.size > SHOWN)}{f' {self.unit}' if self.unit else ''}{shape}"
            )
        return "; ".join(parts)

    @cached_property
    def outputs(self) -> "dict[str, Array]":
        """The outputs by name. The first axis is the items in the order in which they were sent. The caller owns the arrays."""
        return {name: _array(tensor, f"outputs.{name}") for name, tensor in self.tensors.items()}

    @property
    def output(self) -> "Array":
        """The only output. Raises InfaasError if the model has several."""
        if len(self.outputs) != 1:
            raise InfaasError(f"this model has the outputs {', '.join(self.outputs)}: use answer.outputs[name]")
        return next(iter(self.outputs.values()))

    def to_map(self) -> dict[str, Any]:
        """The answer as a JSON map: outputs as nested lists, NaN and infinities as None, without fields that do not apply."""
        fields = {"id": self.id, "outputs": {name: _nested(array) for name, array in self.outputs.items()}}
        for name in self.__struct_fields__:
            if name not in ("id", "tensors", "outputs_ref") and (
                (value := getattr(self, name)) is not None or name == "accuracy"
            ):
                fields[name] = value
        return fields


class _ErrorField(Struct):
    """The field of a reply that tells a refusal from an answer."""

    error: msgspec.Raw = msgspec.Raw()


_NOTHING = (b"", b"\xc0")  # no field, or nil
_either = msgspec.msgpack.Decoder(_ErrorField).decode
_answer = msgspec.msgpack.Decoder(Answer).decode
_any = msgspec.msgpack.Decoder().decode


def refusal(reply: bytes) -> Refused | None:
    """The refusal that `reply` holds, or None if it is no refusal. Raises InfaasError if the reply cannot be read."""
    try:
        if bytes(_either(reply).error) in _NOTHING:
            return None
        return Refused.from_map(_any(reply))
    except DECODE_ERRORS as error:
        raise InfaasError(f"the reply cannot be read: {explain(error)}") from error


def read_answer(reply: bytes) -> Answer | Refused:
    """Decode the reply to a query. Raises InfaasError if it is neither an answer nor a refusal."""
    refused = refusal(reply)
    if refused is not None:
        return refused
    try:
        return _answer(reply)
    except DECODE_ERRORS as error:
        raise InfaasError(f"the reply is no Answer: {explain(error)}") from error


def read_map(reply: bytes) -> dict[str, Any]:
    """Decode the reply to any other request. Raises Refused or InfaasError."""
    refused = refusal(reply)
    if refused is not None:
        raise refused
    value = _any(reply)
    if not isinstance(value, dict):
        raise InfaasError("the reply is no map")
    return value


def _array(tensor: Any, where: str) -> "Array":
    try:
        if isinstance(tensor, Mapping):
            tensor = msgspec.convert(tensor, Tensor)
        return to_array(tensor, where, empty=True).copy()
    except (BadTensor, msgspec.ValidationError) as error:
        raise InfaasError(f"the answer's {where} is no tensor: {error}") from error


def _nested(array: "Array") -> Any:
    if array.dtype.kind == "f":
        import numpy as np  # noqa: PLC0415  (arrays exist already, so numpy is loaded)

        finite = np.isfinite(array)
        if not finite.all():
            shown = array.astype(object)
            shown[~finite] = None
            return shown.tolist()
    return array.tolist()


def would_have(policy: str, cost: float | None, paid: float | None, missed: float | None, was: float | None) -> str:
    """What a policy would have changed, in a sentence. cost, paid: in the same unit. missed, was: shares of the queries. None: unknown."""
    told = []
    if cost is not None and paid:
        share = cost / paid - 1.0
        much = (
            "as much as" if abs(share) < 0.0005 else f"{abs(100 * share):.1f} % {'more' if share > 0 else 'less'} than"
        )
        told.append(f"cost {much} was paid")
    if missed is not None and was is not None:
        told.append(f"missed {100 * missed:.2f} % of the queries instead of {100 * was:.2f} %")
    return f"{policy} would have {' and '.join(told)}." if told else f"{policy}: there is nothing to compare it with."


def why_chosen(explanation: Mapping[str, Any]) -> str:
    """Why the chosen candidate of an explanation comes before all others; "" if none was chosen."""
    chosen = explanation.get("chosen")
    if not chosen:
        return ""
    if explanation.get("members"):
        return "the best for its model"
    if explanation.get("stages"):
        return "what its stage would get"
    candidates = explanation.get("candidates") or []
    chosen = next((each for each in candidates if each.get("variant") == chosen.get("variant")), chosen)
    others = [each for each in candidates if each is not chosen]
    match chosen.get("state"):
        case "Active":
            rivals = [each for each in others if each.get("fits")]
            if not rivals:
                return "the only loaded one that meets all needs" if others else "meets all needs"
            if all(chosen.get("cost_per_1000", 0.0) <= each.get("cost_per_1000", 0.0) for each in rivals):
                return "the cheapest of those that are loaded and meet all needs"
            return "the first, for accuracy, of those that are loaded and meet all needs"
        case "Loading":
            return "it is being loaded, and in time; nothing that is loaded meets all needs"
        case "Overloaded" | "Interfered" as state:
            return f"{state}, but in time; no Active one is"
        case "Warm":
            return "it would come from host memory, being ready soonest; nothing that is loaded meets all needs"
        case None:
            return "meets all needs"
    return "it would be loaded, being ready soonest; nothing that is loaded meets all needs"
