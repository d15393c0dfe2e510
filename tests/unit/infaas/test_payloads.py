"""Kept queries as arrays, with their labels."""

import json
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.flow import Payload, payload_key
from bus.tensors import from_array
from infaas.cli.payloads import arrays_of, delete_kept, label_array, labels_of, numbered, read_kept
from infaas.client import Client
from infaas.errors import BadInput


def payload(n: int, inputs: dict[str, Any], id: str | None = None, **outputs: Any) -> Payload:
    made = (
        {name: from_array(np.asarray(one)) for name, one in side.items()} for side in (inputs, outputs or {"y": [0.0]})
    )
    return Payload(query=f"{n:032x}", time=float(n), variant="v", inputs=next(made), outputs=next(made), id=id)


def test_items_have_the_last_label_of_their_query_by_its_uid_or_its_id() -> None:
    kept = [payload(1, {"x": [[1.0], [2.0]]}, y=[0.1, 0.2]), payload(2, {"x": [[3.0]]}, id="b")]
    rows = [
        (UUID(int=1), None, 1, json.dumps(7)),
        (UUID(int=1), None, 1, json.dumps(8)),
        (None, "b", 0, json.dumps(9)),
        (None, "unknown", 0, json.dumps(9)),
        (UUID(int=3), None, 0, json.dumps(9)),
    ]
    labels = labels_of(rows, kept)
    every = arrays_of(kept, labels, labelled=False)
    assert every.arrays["x"].tolist() == [[1.0], [2.0], [3.0]]
    assert every.arrays["outputs.y"].tolist() == [0.1, 0.2, 0.0]
    assert every.arrays["item"].tolist() == [0, 1, 0]
    assert every.arrays["id"].tolist() == ["", "", "b"]
    np.testing.assert_array_equal(every.arrays["labels"], [np.nan, 8.0, 9.0])
    some = arrays_of(kept, labels, labelled=True)
    assert some.arrays["x"].tolist() == [[2.0], [3.0]]
    assert (some.arrays["labels"].dtype, some.arrays["labels"].tolist()) == (np.int64, [8, 9])
    assert arrays_of(kept, {}, labelled=True).items == 0


def test_items_of_other_shapes_than_most_are_left_out_and_counted() -> None:
    kept = [payload(n, {"x": np.zeros((1, 2 + (n == 3)))}) for n in range(1, 6)]
    found = arrays_of(kept, {}, labelled=False)
    assert (found.items, found.left_out) == (4, 1)


def test_texts_bytes_and_inputs_of_any_name_are_arrays_that_need_no_objects(tmp_path: Any) -> None:
    kept = [payload(1, {"labels": ["one"], "picture": np.array([b"\xff\xfe"], dtype=object)})]
    found = arrays_of(kept, {}, labelled=False).arrays
    np.savez(tmp_path / "f.npz", **found)
    with np.load(tmp_path / "f.npz", allow_pickle=False) as file:
        assert file["x.labels"].tolist() == ["one"]
        assert file["picture"].tolist() == [b"\xff\xfe"]
    assert arrays_of([payload(1, {"id": [[1.0]]})], {}, labelled=False).arrays["x"].tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, 0], np.array([1, 0])),
        ([1.5, None], np.array([1.5, np.nan])),
        (["a", None], np.array(["a", ""])),
        ([[1, 2], None], np.array([[1, 2], [np.nan, np.nan]])),
        ([[1], [1, 2]], np.array(["[1]", "[1, 2]"])),
    ],
)
def test_labels_are_numbers_where_they_can_be(labels: list[Any], expected: Any) -> None:
    np.testing.assert_array_equal(label_array(labels), expected)


def test_names_of_classes_become_their_numbers() -> None:
    assert numbered(np.array(["b", "a"]), ["a", "b"]).tolist() == [1, 0]
    assert numbered(np.array([1, 0]), ["a", "b"]).tolist() == [1, 0]
    with pytest.raises(BadInput, match="no class 'c'"):
        numbered(np.array(["c"]), ["a", "b"])


async def test_a_query_is_deleted_by_the_id_of_its_client_or_of_its_answer() -> None:
    bus = MemoryBus()
    client = Client(bus)
    bucket = await bus.key_value(client.subjects.payloads_bucket)
    for n, app, name in ((1, "a", "mine"), (2, "a", None), (3, "a", "mine"), (4, "b", "mine"), (5, "a", "other")):
        one = payload(n, {"x": [[1.0]]}, id=name)
        await bucket.put(payload_key(app, one.query, name, one.query), encode(one))
    assert [one.id for one in await read_kept(client, "a")] == ["mine", None, "mine", "other"]
    assert await delete_kept(client, "a", "mine") == 2
    assert await delete_kept(client, "a", f"{2:032x}") == 1
    assert await delete_kept(client, "a", "mine") == 0
    assert [one.id for one in await read_kept(client, "a")] == ["other"]
    assert await delete_kept(client, "a") == 1
    assert len(await read_kept(client, "b")) == 1
