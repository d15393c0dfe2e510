"""Every message type survives the codec; MessagePack of any other library is understood, and ours by it."""

import functools
import importlib
import json
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw, Struct, UnsetType

import bus.messages
from bus.codec import BadMessage, decode, encode, in_two, one_array
from bus.messages.catalog import VariantRecord
from bus.messages.flow import DoneBatch, Execute, Route
from bus.messages.public import Answer, ObjectRef, QueryHead, QueryInputs, Refusal, Tensor, TensorHead, TensorView
from bus.messages.verbs import AdminVerb
from tests.support.data.events import variant_record
from tests.support.data.examples import examples

words = st.text(max_size=8)
numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, floats, words, st.binary(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=4,
)
simple: dict[Any, st.SearchStrategy[Any]] = {
    str: words,
    int: numbers,
    float: floats,
    bool: st.booleans(),
    bytes: st.binary(max_size=16),
    memoryview: st.binary(max_size=16).map(memoryview),
    type(None): st.none(),
    UnsetType: st.just(UNSET),
    Raw: anything.map(lambda value: Raw(encode(value))),
    Any: anything,
}


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as far as message types use types."""
    if hint in simple:
        return simple[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(part) for part in parts])
    if origin is list:
        return st.lists(values(parts[0]), max_size=3)
    if origin is tuple and Ellipsis not in parts:
        return st.tuples(*(values(part) for part in parts))
    if origin is dict:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints = typing.get_type_hints(hint)
        return st.deferred(lambda: st.builds(hint, **{name: values(hints[name]) for name in hint.__struct_fields__}))
    raise TypeError(f"no values for {hint}: teach this test")


def message_types() -> list[type[Struct]]:
    found: dict[str, type[Struct]] = {}
    for module in pkgutil.iter_modules(bus.messages.__path__):
        members = vars(importlib.import_module(f"bus.messages.{module.name}")).items()
        found |= {name: m for name, m in members if isinstance(m, type) and issubclass(m, Struct) and m is not Struct}
    return list(found.values())


def test_all_message_modules_are_covered() -> None:
    names = {message.__name__ for message in message_types()}
    assert {"QueryHead", "Route", "WorkerHeartbeat", "VariantRecord", "OutcomeEvent", "BuildVariants"} <= names


@pytest.mark.parametrize("message", message_types(), ids=lambda message: message.__name__)
def test_a_message_comes_back_as_it_was(message: type[Struct]) -> None:
    @settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(values(message))
    def check(value: Struct) -> None:
        wire = encode(value)
        back = decode(message, wire)
        assert encode(back) == wire
        if not any(hint in (Raw, memoryview) for hint in typing.get_type_hints(message).values()):
            assert back == value

    check()


def test_messages_are_frozen_and_named_by_their_fields() -> None:
    for message in message_types():
        assert message.__struct_config__.frozen, message
        # The subject of a verb says the same.
        assert message.__struct_config__.tag is None or issubclass(message, AdminVerb), message
        if message.__name__ not in NAMED_AS_IN_FILES:
            assert message.__struct_encode_fields__ == message.__struct_fields__, message


# [[vertex]], [[edge]] with `from`, which is a word of Python
NAMED_AS_IN_FILES = {"PipelineRecord", "PipelineEdge", "SetPipeline"}


@pytest.mark.parametrize("message", message_types(), ids=lambda message: message.__name__)
def test_no_bytes_crash_the_decoder(message: type[Struct]) -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(st.one_of(st.binary(max_size=40), anything.map(encode)))
    def check(wire: bytes) -> None:
        try:
            decode(message, wire)
        except BadMessage as error:
            assert str(error)

    check()


def test_a_query_of_a_foreign_library() -> None:
    wire = msgpack.packb(
        {
            "inputs": {"datatype": "FP32", "shape": [1, 2], "data": bytes(8)},
            "latency_ms": 50,  # an integer where a float is meant
            "accuracy": 0.9,
            "id": "7",
            "retry_key": b"0123456789abcdef",
            "unknown": {"nested": [1, None]},
        }
    )
    head = decode(QueryHead, wire)
    assert (head.latency_ms, head.accuracy, head.id, head.retry_key) == (50.0, 0.9, "7", b"0123456789abcdef")
    assert decode(Tensor, bytes(head.inputs)) == Tensor("FP32", [1, 2], bytes(8))
    assert decode(TensorView, bytes(decode(QueryInputs, wire).inputs)).data == bytes(8)
    assert bytes(decode(TensorHead, bytes(head.inputs)).data) == msgpack.packb(bytes(8))


@settings(deadline=None)
@given(anything)
def test_a_foreign_library_writes_what_we_read(value: Any) -> None:
    assert msgspec.msgpack.decode(msgpack.packb(value)) == value


@settings(deadline=None)
@given(values(Refusal))
def test_a_foreign_library_reads_a_refusal(refusal: Refusal) -> None:
    plain = msgpack.unpackb(encode(refusal))
    assert plain["error"]["code"] == refusal.error.code
    assert ("closest" in plain["error"]) == (refusal.error.closest is not UNSET)
    assert plain["id"] == refusal.id


def test_a_foreign_library_reads_an_answer() -> None:
    answer = Answer(
        id=None,
        outputs={"y": Tensor("FP32", [1, 1], b"\0\0\x80?")},
        model="m",
        version="1",
        variant="v",
        hardware="cpu",
        worker="w",
        accuracy=None,
        latency_ms=1.5,
        queue_ms=1.0,
        compute_ms=0.5,
        batch=3,
        cached=False,
        simulated=False,
        cost=1e-6,
        missed=["accuracy"],
    )
    plain = msgpack.unpackb(encode(answer))
    assert plain["outputs"] == {"y": {"datatype": "FP32", "shape": [1, 1], "data": b"\0\0\x80?"}}
    assert plain["missed"] == ["accuracy"]
    assert "confidence" not in plain


def test_bodies_are_forwarded_untouched_and_earlier_records_are_read() -> None:
    body = msgpack.packb({"inputs": [[1.0, 2.0]], "something": "only the client knows"})
    route = Route(b"u" * 16, 0, 1, "_INBOX.x", 2.0, 1.0, "d0", "i0", "faces", 1, None)
    back = decode(Execute, encode(Execute(route, Raw(body))))
    assert bytes(back.body) == body
    assert back.route == route
    # Records of earlier versions stay in the catalogue.
    record = variant_record()
    fields = msgpack.unpackb(encode(record))
    del fields["accuracy_low"], fields["accuracy_high"]
    assert decode(VariantRecord, msgpack.packb(fields)) == record


def test_hot_messages_are_arrays_and_references_round_trip() -> None:
    for message in (Route, Execute, DoneBatch):
        assert message.__struct_config__.array_like
    assert decode(ObjectRef, msgpack.packb({"bucket": "b", "key": "k"})) == ObjectRef("b", "k")


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (b"", "MessagePack"),
        (b"\xc1", "MessagePack"),
        (msgpack.packb([1, 2]), "the body must be a map of fields, not a list"),
        (msgpack.packb({"accuracy": "high"}), "`accuracy`"),
        (msgpack.packb({"inputs_ref": {"bucket": "b"}}), "field `inputs_ref.key` is missing"),
        (msgpack.packb({"priority": 1.5}), "field `priority` must be a whole number, not a fraction"),
        (msgpack.packb({"inputs": [1]})[:-1], "not valid MessagePack: it ends too early; send a map of fields"),
        (msgpack.packb({"inputs_ref": {"bucket": 1, "key": "k"}}), "`inputs_ref.bucket`"),
        (msgpack.packb({"model": b"bytes"}), "`model`"),
        (msgpack.packb({"id": "x"}) + b"\x01", "MessagePack"),
        (b"\x81\xa2id\xa1\xff", "MessagePack"),
        (b"\x81\xa6inputs" + b"\x91" * 100_000, "the body is nested too deeply"),
    ],
)
def test_an_error_names_the_field(wire: bytes, says: str) -> None:
    with pytest.raises(BadMessage) as error:
        decode(QueryHead, wire)
    assert says in str(error.value)


@given(st.binary(max_size=300))
def test_in_two_is_what_one_would_be(body: bytes) -> None:
    message = Execute(Route(b"u", 0, 0, "r", 1.0, 2.0, "d", "i", "a", 1, None), Raw(encode(body)))
    beginning, rest = in_two(message)
    assert beginning + rest == encode(message)


@given(st.lists(st.integers(0, 70_000) | st.integers(0, 20), max_size=4))
def test_one_array_is_what_all_elements_would_be(lengths: list[int]) -> None:
    arrays = [list(range(length)) for length in lengths]
    elements = [element for array in arrays for element in array]
    assert decode(list[int], one_array(map(encode, arrays))) == elements


LAYOUTS = json.loads(Path(__file__).with_name("layouts.json").read_text())


@pytest.mark.parametrize("message", message_types(), ids=lambda message: message.__name__)
def test_both_versions_of_an_upgrade_read_a_message(message: type[Struct]) -> None:
    """What is read by its place gains fields at its end; nothing gains a field that an older sender does not give. layouts.json has what was sent so far."""
    array, fields = message.__struct_config__.array_like, message.__struct_fields__
    needed = [one.name for one in msgspec.structs.fields(message) if one.required]
    now = list(fields) if array else needed
    known = LAYOUTS.get(message.__name__)
    assert known is not None, f'new: add "{message.__name__}": {json.dumps(now)} to layouts.json'
    if array:
        assert now[: len(known)] == known, "fields keep their places: add new ones at the end, and leave unused ones"
        assert not set(needed) & set(now[len(known) :]), "a new field needs a default"
        assert len(now) == len(known), f"add {now[len(known) :]} to layouts.json"
    else:
        assert set(needed) <= set(known), "a new field needs a default"
