import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.oip.duplicates import UNKNOWN, find_duplicate
from services.gateway.oip.infer import BadInference, read

NAMES = st.text(max_size=3)
PARAMETERS = st.dictionaries(NAMES, st.integers() | st.text(max_size=3) | st.booleans(), max_size=3)


@given(
    PARAMETERS,
    st.lists(NAMES, max_size=3, unique=True),
    st.booleans(),
    st.lists(st.text(max_size=3), min_size=1, max_size=3),
)
def test_nothing_that_stands_once_is_refused(
    parameters: dict, outputs: list[str], label: bool, texts: list[str]
) -> None:
    parameters.pop("binary_data_output", None)
    request = {
        "inputs": [
            {"name": "a", "shape": [len(texts)], "datatype": "BYTES", "data": texts, "parameters": {"note": "inputs"}},
            {"name": "b", "shape": [1], "datatype": "FP32", "data": [1.5], "unknown": {"name": 1}},
        ],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
        **({"id": "data"} if label else {}),
    }
    asked = read(json.dumps(request).encode(), None, None)
    assert set(asked.inputs) == {"a", "b"}


@given(st.dictionaries(NAMES, st.integers() | PARAMETERS, min_size=1, max_size=3), st.data())
def test_what_stands_twice_is_found_wherever_it_is(value: dict, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(value)))
    text = json.dumps(value)[:-1] + f", {json.dumps(name)}: 0" + "}"
    assert find_duplicate(f'{{"in": [{text}]}}'.encode(), UNKNOWN)


@pytest.mark.parametrize("where", ["top", "input", "parameters", "output"])
def test_a_request_with_a_name_twice_is_refused(where: str) -> None:
    twice = {"top": "", "input": "", "parameters": "", "output": ""} | {where: ', "k": 1, "k": 2'}
    first = ', "k": 1, "k": 2'.replace(", ", "", 1) if where == "parameters" else ""
    text = (
        f'{{"inputs": [{{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]{twice["input"]}}}], '
        f'"outputs": [{{"name": "y"{twice["output"]}}}], "parameters": {{{first}}}{twice["top"]}}}'
    )
    with pytest.raises(BadInference, match="'k' twice"):
        read(text.encode(), None, None)
