"""docs/asyncapi.yaml tells the truth about the message types and can be read."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bus.messages.catalog
import bus.messages.events
import bus.messages.fleet
import bus.messages.flow
import bus.messages.jobs
import bus.messages.public
import bus.messages.scaling
import bus.messages.verbs
import bus.messages.work
from tests.support.data.documents import references
from tools.asyncapi.document import document
from tools.asyncapi.schema import schemas
from tools.asyncapi.yaml import dump

ROOT = Path(__file__).parents[2]
MODULES = (
    bus.messages.catalog,
    bus.messages.events,
    bus.messages.fleet,
    bus.messages.flow,
    bus.messages.jobs,
    bus.messages.public,
    bus.messages.scaling,
    bus.messages.verbs,
    bus.messages.work,
)
# ways of reading a message in part, base classes
NOT_CHANNELS = {"TensorView", "TensorHead", "QueryInputs", "Event", "AdminVerb", "AppSettings", "BatchingFields"}
IN_BUCKETS = {"Part", "Payload", "BatchingRule", "PipelineReplicas"}  # what objects and keys hold


def test_the_file_is_current() -> None:
    assert (ROOT / "docs" / "asyncapi.yaml").read_text() == dump(document()), "run `python -m tools.asyncapi`"


def test_every_message_type_is_described() -> None:
    described = set(document()["components"]["schemas"])
    declared = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    }
    assert declared - described - NOT_CHANNELS - IN_BUCKETS == set()


def test_every_reference_leads_somewhere() -> None:
    whole = document()
    for reference in set(references(whole)):
        place: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            assert step in place, reference
            place = place[step]


def test_required_fields_are_those_without_default() -> None:
    class Example(msgspec.Struct):
        needed: int
        wanted: float | None = None
        words: list[str] = []

    found = schemas([Example])["Example"]
    assert found["required"] == ["needed"]
    assert found["properties"]["needed"] == {"type": "integer"}
    assert found["properties"]["wanted"] == {"type": ["number", "null"]}
    assert found["properties"]["words"] == {"type": "array", "items": {"type": "string"}}


def test_arrays_keep_the_order_of_their_fields() -> None:
    class Pair(msgspec.Struct, array_like=True):
        first: bytes
        second: str = "x"

    found = schemas([Pair])["Pair"]
    assert [item["title"] for item in found["prefixItems"]] == ["first", "second"]
    assert found["minItems"] == 1


@pytest.mark.parametrize("text", ["yes", "null", "3.0.0", "a: b", "- a", "", "#x", "{a}", "é\n", "0x10", "on"])
def test_words_that_yaml_would_misread_are_quoted(text: str) -> None:
    assert dump({"key": text}).startswith('key: "')


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12))
def test_plain_words_are_plain(text: str) -> None:
    line = dump([text])
    assert line.startswith('- "') or re.fullmatch(r"- [A-Za-z$/][\w$/.-]*\n", line)
