"""services/gateway/oip/infer.py: what a body may hold beside its tensors."""

import json

import pytest

from services.gateway.errors import BadRequest
from services.gateway.oip.infer import read

INPUTS = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("accuracy", "accuracy"), ("acuracy", "accuracy"), ("latency_ms", "latency_ms"), ("Cost", "cost"), ("timeout", "timeout")],
)  # fmt: skip
def test_a_need_beside_the_parameters_is_refused_with_the_remedy(name: str, meant: str) -> None:
    remedy = f'^{name} is not read beside parameters: give {{"parameters": {{"{meant}": ...}}}}$'
    for more in ({}, {"id": "me", "outputs": [{"name": "y"}], "parameters": {"cost": 1.0}}):
        with pytest.raises(BadRequest, match=remedy):
            read(json.dumps({"inputs": INPUTS, name: 0.9, **more}).encode(), None, None)


def test_a_need_is_found_in_front_of_raw_data_and_behind_an_escape() -> None:
    raw = [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]
    head = json.dumps({"inputs": raw, "accuracy": 0.9}).replace("accuracy", "\\u0061ccuracy").encode()
    with pytest.raises(BadRequest, match=r"^accuracy is not read beside parameters"):
        read(head + bytes(4), len(head), None)


def test_what_the_protocol_has_and_what_is_no_need_stays() -> None:
    body = {"inputs": INPUTS, "id": "me", "outputs": [{"name": "y"}], "parameters": {"accuracy": 0.9}}
    for more in ({}, {"model_name": "m", "tracking": {"accuracy": 0.9}, "latency": 3}):
        asked = read(json.dumps({**body, **more}).encode(), None, None)
        assert (asked.id, asked.parameters) == ("me", {"accuracy": 0.9})
