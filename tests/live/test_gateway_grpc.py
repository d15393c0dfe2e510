"""Whole systems, asked with Triton's stock gRPC client: real models answer, and needs are met."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support.clients.retrying import insist
from tests.support.servers.processes import eventually, infaas
from tests.support.servers.system import APP, MODELS, Whole

LATER = ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.UNAVAILABLE")


@pytest.fixture(scope="module")
def client(system: Whole) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(system.gateway_grpc) as found:
        yield found


def given(x: np.ndarray) -> triton.InferInput:
    found = triton.InferInput("x", list(x.shape), "FP32")
    found.set_data_from_numpy(x.astype(np.float32))
    return found


def infer(client: triton.InferenceServerClient, x: np.ndarray, name: str = APP, **needs: Any) -> triton.InferResult:
    return insist(lambda: client.infer(name, [given(x)], **needs), LATER)


def told(result: triton.InferResult) -> dict[str, Any]:
    parameters = result.get_response().parameters
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def test_real_answers_by_app_model_and_variant(client: triton.InferenceServerClient, system: Whole) -> None:
    x, y = system.x[:32], system.y[:32]
    result = infer(client, x)
    assert (result.as_numpy("scores").argmax(1) == y).mean() > 0.8
    by_model = infer(client, x, f"{APP}.{MODELS[1]}")
    variant = told(by_model)["variant"]
    assert told(by_model)["model"] == MODELS[1]
    again = infer(client, x, f"{APP}.{MODELS[1]}.{variant}", model_version="1")
    assert told(again)["variant"] == variant
    np.testing.assert_allclose(again.as_numpy("scores"), by_model.as_numpy("scores"), rtol=1e-4, atol=1e-4)


def test_inputs_larger_than_a_message_of_the_bus(client: triton.InferenceServerClient, system: Whole) -> None:
    x = np.concatenate([system.x[:512]] * 8)  # 12 MB
    y = np.concatenate([system.y[:512]] * 8)
    assert (infer(client, x).as_numpy("scores").argmax(1) == y).mean() > 0.8


def test_a_pipeline_is_asked_like_any_app(client: triton.InferenceServerClient, system: Whole, tmp_path: Path) -> None:
    file = tmp_path / "straight.toml"
    file.write_text(
        f"""[pipeline]
        name = "straight"
        latency_ms = 20000
        [[vertex]]
        name = "only"
        app = "{APP}"
        inputs = {{ x = "$.picture" }}
        [output]
        classes = "only.scores"
        """
    )
    where = ("--data-dir", str(system.directory))
    done = infaas("pipeline", "add", str(file), *where)
    assert done.returncode == 0, done.stderr
    try:
        assert eventually(lambda: client.is_model_ready("straight"))
        described = client.get_model_metadata("straight")
        (picture,), (classes,) = described.inputs, described.outputs
        assert (picture.name, picture.datatype, list(picture.shape)) == ("picture", "FP32", [-1, 784])
        assert (classes.name, classes.datatype, list(classes.shape)) == ("classes", "FP32", [-1, 10])
        assert "straight" in {one.name for one in client.get_model_repository_index().models}
        asked = triton.InferInput("picture", [32, 784], "FP32")
        asked.set_data_from_numpy(system.x[:32].astype(np.float32))
        result = insist(lambda: client.infer("straight", [asked]), LATER)
        assert (result.as_numpy("classes").argmax(1) == system.y[:32]).mean() > 0.8
    finally:
        assert infaas("pipeline", "remove", "straight", *where).returncode == 0
