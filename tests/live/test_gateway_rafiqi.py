"""Rafiqi's REST as its users speak it: curl, against a running system."""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.gateways.curl import LABELS, Place, Said, blob, curl, fine
from tests.support.models import poison_models, tiny_models
from tests.support.servers.processes import eventually

NOISE = 1e-4  # of floats, by which confidences of two variants of a model may differ


def classified(place: Place, model: str, data: bytes) -> Any:
    """Guesses for an input, asked for until they come: variants are loaded by the first queries."""
    found: list[Said] = []

    def ask() -> bool:
        found.append(curl(place, f"/classify?model_name={model}", data))
        return found[-1].status == 200

    assert eventually(ask), found[-1]
    return found[-1].body


def by_label(guesses: list[dict[str, Any]]) -> dict[str, float]:
    return {guess["label"]: guess["confidence"] for guess in guesses}


def test_a_session_in_rafiqis_words(place: Place) -> None:
    x, y = tiny_models.digits(20)
    files = {"validation": {"URL": f"{place.files}/validation.npz"}, "labels": {"URL": f"{place.files}/labels.txt"}}
    inline = {
        "validation": blob(tiny_models.npz(x=tiny_models.digits()[0], y=tiny_models.digits()[1])),
        "labels": list(LABELS),
    }
    wish = {
        "by-url": {"model": {"URL": f"{place.files}/mlp.onnx"}, **files},
        "by-blob": {"model": blob(tiny_models.exact(tiny_models.mlp())), **inline},
    }
    done = fine(place, "/register", {"models": wish})
    assert (done["success"], done["error"]) == (True, "")
    assert {"by-url", "by-blob"} <= set(done["allModels"])
    assert eventually(lambda: {"by-url", "by-blob"} <= {model["name"] for model in fine(place, "/list")})
    found = {name: classified(place, name, x[0].tobytes()) for name in wish}
    assert by_label(found["by-url"]) == pytest.approx(by_label(found["by-blob"]), abs=NOISE)
    for guesses in found.values():
        confidences = [guess["confidence"] for guess in guesses]
        assert guesses[0]["label"] == LABELS[y[0]]
        assert confidences == sorted(confidences, reverse=True)
        assert sum(confidences) == pytest.approx(1.0, abs=1e-3)
    file = io.BytesIO()
    np.save(file, x[:3])
    several = classified(place, "by-url", file.getvalue())
    assert [guesses[0]["label"] for guesses in several] == [LABELS[number] for number in y[:3]]

    image = pytest.importorskip("PIL.Image", reason="images need pillow")
    pixels = (np.arange(16).reshape(4, 4) * 16).astype(np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    raw = (pixels.astype(np.float32) / 255).tobytes()
    drawn, given = (by_label(classified(place, "by-url", data)) for data in (file.getvalue(), raw))
    assert drawn == pytest.approx(given, abs=NOISE)


@pytest.mark.parametrize(
    ("model", "status", "word"),
    [
        ({"URL": "file:///etc/passwd"}, 400, "only http"),
        ({"URL": "http://169.254.169.254/latest/meta-data/"}, 403, "register_hosts"),
        ({"URL": "http://127.0.0.1:{port}/moved.onnx"}, 502, "redirects"),
        ({"blob": "not base64!"}, 400, "base64"),
        (7, 400, "URL"),
    ],
)
def test_what_may_not_be_registered_is_refused_with_the_reason(
    place: Place, model: Any, status: int, word: str
) -> None:
    if isinstance(model, dict) and "URL" in model:
        model = {"URL": model["URL"].format(port=place.files.rpartition(":")[2])}
    said = curl(place, "/register", {"models": {"never": {"model": model, "validation": blob(b"x")}}})
    assert said.status == status
    assert word in said.body["error"]
    assert "never" not in {each["name"] for each in fine(place, "/list")}


@pytest.mark.parametrize("kind", ["tf", "\0"])
def test_a_format_is_one_of_those_there_are(place: Place, kind: str) -> None:
    fields = {"model": blob(b"x"), "validation": blob(b"x"), "format": kind}
    said = curl(place, "/register", {"models": {"never": fields}})
    assert said.status == 400
    assert "onnx" in said.body["error"]


def test_a_model_without_validation_or_that_is_none_is_refused(place: Place) -> None:
    said = curl(place, "/register", {"models": {"never": {"model": blob(tiny_models.mlp())}}})
    assert said.status == 400
    assert "validation is missing" in said.body["error"]
    said = curl(place, "/register", {"models": {"never": {"model": blob(b"no model"), "validation": blob(b"none")}}})
    assert said.status in (400, 422)
    assert said.body["error"]
    assert curl(place, "/classify?model_name=never", b"x").status == 404
    assert curl(place, "/classify", b"x").status == 400


def test_a_stuck_model_fails_and_its_worker_survives(place: Place) -> None:
    """Row 93: a run that never ends is ended. The same process answers everybody else meanwhile, and the same model after that."""
    x, y = tiny_models.digits(20)
    whole = dict(zip("xy", tiny_models.digits(), strict=True))
    wish = {
        "model": blob(poison_models.hanging()),
        "validation": blob(tiny_models.npz(**whole)),
        "labels": list(LABELS),
    }
    fine(place, "/register", {"models": {"stuck": wish}})
    classified(place, "stuck", x[0].tobytes())
    assert eventually(lambda: not fine(place, "/digits/predict", {"input": [0.0] * 784})["default"])
    workers = place.system.pids("executor")
    bad = x[0].copy()
    bad[0] = poison_models.POISON
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(curl, place, "/classify?model_name=stuck", bad.tobytes())
        others = [curl(place, "/digits/predict", {"input": [0.0] * 784}) for _ in range(20)]
        said = waiting.result()
    assert said.status == 500, said
    assert said.body["error"]
    assert [other.status for other in others] == [200] * 20
    assert place.system.pids("executor") == workers
    assert classified(place, "stuck", x[0].tobytes())[0]["label"] == LABELS[y[0]]
