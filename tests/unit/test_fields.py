"""Fields say their bounds once: the compiled check is the walker, and every door of a query has the fields of its message."""

from dataclasses import fields as options
from math import inf, nan
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Struct, UnsetType

from bus.fields import TOKEN, Checked, Fault, Length, Number, Text, check_of, choice, faults, fields_of
from bus.messages.catalog import METRICS
from bus.messages.public import Requirements
from infaas.cli.options import NeedOptions
from infaas.queries import Needs
from services.core.toml import Location, TomlError, struct_at
from services.gateway.errors import BadRequest
from services.gateway.oip.parameters import NEEDS, requirements_of
from services.simulation.scenario import model
from tools.asyncapi.schema import schemas
from tools.openapi.operation import properties

# The client makes an accuracy of metrics by name; no needs of a variant are the others.
ELSEWHERE = METRICS.keys() - {"top1", "top5"} | {"id", "input_digest"}


class Every(Struct, frozen=True, kw_only=True):
    """A field of each kind."""

    above: Annotated[float | None, Number(above=0, unit="seconds"), "Seconds."] = None
    below: Annotated[float, Number(least=-1, below=1), "Below one."] = 0.0
    zero: Annotated[int, Number(5, 9, zero="none")] = 0
    unset: Annotated[float | UnsetType | None, Number(most=1)] = UNSET
    name: Annotated[str | None, TOKEN] = None
    kind: Annotated[str, choice("a", "b|c")] = "a"
    short: Annotated[str, Length(3, least=1)] = "x"
    free: Any = None


NUMBERS = st.sampled_from([-inf, -1, -0.5, 0, 0.5, 1, 1.0, 5, 7, 9, 10, 2**70, inf, nan]) | st.floats()
ABSENT = st.sampled_from([None, UNSET])
TEXTS = st.sampled_from(["", "a", "b|c", "b", "xyz", "long", "a b", "ü", "a" * 64, "a" * 65, "a\n"])


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "above": NUMBERS | st.none(), "below": NUMBERS, "zero": NUMBERS, "unset": NUMBERS | ABSENT, "name": TEXTS | st.none(),
            "kind": TEXTS, "short": TEXTS,
        },
    )
)  # fmt: skip
def test_the_compiled_check_finds_the_first_fault_of_the_walker(given_: dict[str, Any]) -> None:
    message = Every(**given_)
    assert check_of(Every)(message) == next(faults(message), None)


def test_bounds_are_said_in_words_and_in_json_schema() -> None:
    known = fields_of(Every)
    said = {name: field.rule.words for name, field in known.items() if field.rule is not None and name != "name"}
    assert said == {
        "above": "seconds, above 0", "below": "at least -1 and below 1", "zero": "0 (none), or at least 5 and at most 9",
        "unset": "at least 0 and at most 1", "kind": "one of a, b|c", "short": "1 to 3 characters long",
    }  # fmt: skip
    assert {name: properties(Every)[name] for name in ("above", "below", "short")} == {
        "above": {"type": ["number", "null"], "exclusiveMinimum": 0, "description": "Seconds."},
        "below": {"type": "number", "minimum": -1, "exclusiveMaximum": 1, "default": 0.0, "description": "Below one."},
        "short": {"type": "string", "minLength": 1, "maxLength": 3, "default": "x"},
    }
    assert (known["unset"].absent, known["above"].type, known["below"].default) == (("UNSET", "None"), float, 0.0)


class Pair(Checked, frozen=True):
    low: Annotated[float, Number()] = 0.0
    items: list[Every] = []
    named: dict[Annotated[str, TOKEN], Annotated[int, Number(1, 3)]] = {}

    def conflicts(self) -> Any:
        if self.low > len(self.items):
            yield Fault("low", "must be at most the number of items")


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (Pair(), []),
        (Pair(low=2.0), ["low must be at most the number of items"]),
        (Pair(low=-1.0, items=[Every(), Every(kind="d")]), ["low must be at least 0, not -1", "items[1].kind must be one of a, b|c, not 'd'"]),
        (Pair(named={"a b": 1, "c": 4}), [
            "named.a b the name must be 1 to 64 letters, digits, - or _, a letter or digit first, not 'a b'",
            "named.c must be at least 1 and at most 3, not 4",
        ]),
    ],
)  # fmt: skip
def test_faults_are_found_inside_and_conflicts_where_each_field_is_right(message: Pair, found: list[str]) -> None:
    assert [str(fault) for fault in faults(message)] == found


def test_a_wrong_text_is_shown_short() -> None:
    assert len(Text("a", "an a").refuse("b" * 10_000) or "") < 120


# -- the doors of a query


@pytest.mark.parametrize("name", Requirements.__struct_fields__)
def test_each_need_is_at_every_door(name: str) -> None:
    field = fields_of(Requirements)[name]
    assert field.meaning
    assert field.rule is not None
    assert name in Needs.__annotations__
    described = schemas([Requirements])["Requirements"]["properties"][name]
    assert described.items() >= {**field.rule.schema, "description": field.meaning}.items()
    if name == "deadline":  # the command line has a timeout, so has Triton; a scenario knows no moment
        return
    assert name in {option.name for option in options(NeedOptions)}
    assert name in NEEDS
    if name != "context":  # of a scenario, each load has its own
        assert name in model.NEEDS


def test_no_door_has_a_need_that_no_message_has() -> None:
    known = set(Requirements.__struct_fields__) | ELSEWHERE
    assert set(Needs.__annotations__) == known
    assert {option.name for option in options(NeedOptions)} | {*NEEDS, *model.NEEDS} <= known


@pytest.mark.parametrize(
    ("name", "value"),
    [("latency_ms", -1.0), ("accuracy", 2.0), ("cost", -1.0), ("priority", 10), ("confidence", 1.5), ("model", "a b")],
)
def test_all_doors_refuse_in_the_same_words(name: str, value: Any) -> None:
    wrong = check_of(Requirements)(Requirements(**{name: value}))
    assert wrong is not None
    with pytest.raises(BadRequest) as refused:
        requirements_of({name: value}, 0.0)
    assert str(refused.value) == f"parameters.{wrong}"
    with pytest.raises(TomlError) as read:
        struct_at({name: value}, Location("file"), Requirements)
    assert str(read.value) == f"file: {wrong.key}: {wrong.reason}"
