"""The parts of the demo of a pipeline that need no system: the load, the judgement, the figures, the picture."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from infaas.answers import Answer
from infaas.demo.digits import (
    ACCURATE,
    APPS,
    CHEAP,
    LATENCY_MS,
    NEAREST,
    TRAIN,
    UNSEEN,
    UNSURE,
    VALIDATION,
    VERTICES,
    DemoStages,
    load,
    make_stages,
    models,
    pipeline_file,
    save_nearest,
    scores_of,
    unsure,
)
from infaas.demo.load import DemoReply, Labelled
from infaas.demo.pipeline import (
    BINS,
    EDGES,
    KIND,
    PHASES,
    draw,
    figures,
    judge,
    last_of,
    results,
    series,
    shown,
    vertices,
)
from infaas.demo.program import DemoTable
from infaas.errors import Refused
from services.core.pipelines.checks import pipeline_errors
from services.simulation.scenario.pipelines import read_pipeline
from tests.unit.infaas.demo import test_results

PICTURES = load(UNSEEN)
SECONDS = 100.0
STAGE = {"batch": 1, "replicas": 1, "scale": 1.0, "service_ms": 1.0, "rho": 0.1, "accuracy": 0.9, "variant": "exact"}
PLAN = {"policy": "inferline", "status": "optimal", "rate": 10.0, "cost_per_s": 1e-5, "p99_ms": 5.0}
PLAN |= {"vertices": dict.fromkeys(VERTICES, STAGE)}
SERVED: dict[str, dict[str, Any]] = {
    "quick": {"visits": 4, "variants": ["a", "b"], "batch": 2.0, "cost": 1.5e-9, "p50_ms": 1.0, "p99_ms": 2.0},
    "check": {"visits": 4, "variants": ["d"], "batch": 1.0, "cost": 5e-9, "p50_ms": 1.0, "p99_ms": 2.0},
    "exact": {"visits": 2, "variants": ["c"], "batch": 1.0, "cost": 4e-9, "p50_ms": 1.0, "p99_ms": 2.0},
}
EVENTS = [
    {"time": 900.0, "vertex": vertex, "action": "deploy", "from_replicas": 0, "to_replicas": 1, "reason": "planned"} for vertex in VERTICES
] + [{"time": 1050.0, "vertex": vertex, "action": "up", "from_replicas": 1, "to_replicas": 4, "reason": "more"} for vertex in VERTICES]  # fmt: skip


def answer(scores: np.ndarray, *members: str, agreed: float = 0.9, **other: Any) -> Answer:
    tensors = {"scores": scores.tolist(), "verdict": [[1.0 - agreed, agreed]]}
    return test_results.answer(members=list(members), tensors=tensors, **other)


def replies() -> list[DemoReply]:
    """One a second. The fifth is late, the sixth refused, the seventh says a wrong digit."""
    found = []
    for n in range(100):
        picture = np.array([7 * n])
        labels = PICTURES.y[picture]
        agreed = 0.1 if n == 6 else 0.9
        scores = np.eye(10, dtype=np.float32)[(labels + (n == 6)) % 10]
        said: Answer | Refused = answer(scores, *([f"{ACCURATE}@1"] if n % 4 == 0 else []), agreed=agreed, cost=2e-9)
        if n == 5:
            said = Refused("deadline", "later")
        found.append(DemoReply(KIND.name, picture, labels, said, n + 0.5, LATENCY_MS + 1 if n == 4 else 10.0))
    return found


def result() -> dict[str, Any]:
    events = [{**row, "at_s": row["time"] - 1000.0} for row in EVENTS]
    return {
        "app": "digits", "objective_ms": LATENCY_MS, "capacity_qps": 300.0, "rates": [40.0, 120.0, 40.0], "queries": 110, "plan": PLAN, "pipeline_file": None, "vertices": vertices(PLAN, SERVED), "events": events,
        **results(replies(), PICTURES, SERVED, SECONDS),
        "series": series(replies(), EVENTS, 1000.0, SECONDS),
    }  # fmt: skip


def test_phases_and_visits() -> None:
    assert EDGES == (0.0, 0.08, 0.2, 1.0)
    quick = vertices(PLAN, SERVED)[0]
    assert (quick["visits"], quick["batch"], quick["variants"]) == (4, 2.0, ["a", "b"])


def test_an_answer_is_wrong_if_the_accurate_model_was_due_and_not_asked() -> None:
    sure, unsure = np.full((1, 10), 0.005), np.full((1, 10), 0.05)
    sure[0, 3], unsure[0, 3] = 0.955, 0.55
    cheap = (f"{CHEAP}@1", f"{NEAREST}@1")
    every = (f"{CHEAP}@1", f"{ACCURATE}@1", f"{NEAREST}@1")
    assert not judge(KIND, 1, "q", answer(sure, *cheap))
    assert not judge(KIND, 1, "q", answer(unsure, *every))
    assert "not asked" in judge(KIND, 1, "q", answer(unsure, *cheap))
    assert "id 'q'" in judge(KIND, 1, "other", answer(sure, *cheap))
    assert "not 2" in judge(KIND, 1, "q", answer(sure, cheap[0]))
    assert "scores" in judge(KIND, 1, "q", answer(sure[:, :9], *cheap))
    assert "scores" in judge(KIND, 1, "q", answer(np.full((1, 10), np.nan), *cheap))
    assert "simulated" in judge(KIND, 1, "q", answer(sure, *cheap, simulated=True))


def test_figures_of_the_phases_and_of_the_whole() -> None:
    found = results(replies(), PICTURES, SERVED, SECONDS)
    assert (found["answered"], found["refused"]) == (99, {"deadline": 1})
    assert [phase["sent"] for phase in found["phases"]] == [8, 12, 80]
    assert [phase["slo_attainment"] for phase in found["phases"]] == [pytest.approx(6 / 8), 1.0, 1.0]
    assert found["slo_attainment"] == pytest.approx(0.98)
    assert found["p50_ms"] == 10.0
    assert found["accuracy"] == pytest.approx(98 / 99)
    assert found["computed"]["quick"] < found["computed"]["both"] <= 1.0
    assert found["cost_per_1000"] == pytest.approx(2e-6)
    assert found["computed"]["costs_per_1000"] == pytest.approx([4e-6, 5e-6])
    assert found["check"] == {"right": {"answers": 98, "doubted": 0}, "wrong": {"answers": 1, "doubted": 1}}


def test_figures_and_series_of_runs_with_and_without_answers() -> None:
    lost = [DemoReply(KIND.name, np.array([0]), np.array([0]), Refused("overloaded", "full"), 1.0, 5.0)]
    found = results(lost, PICTURES, {}, SECONDS)
    assert (found["answered"], found["accuracy"], found["cost_per_1000"]) == (0, None, None)
    assert found["slo_attainment"] == 0.0
    assert found["p99_ms"] is None
    assert found["phases"][2]["slo_attainment"] is None
    assert vertices(PLAN, {})[0]["batch"] is None
    found = series(replies(), EVENTS, 1000.0, SECONDS)
    assert len(found["time"]) == len(found["qps"]) == len(found["attainment"]) == BINS
    assert sum(found["qps"]) * SECONDS / BINS == pytest.approx(100)
    assert found["wanted"]["exact"] == [1] * 29 + [4] * 31
    assert found["attainment"][2:4] == [0.5, 0.5]  # of two, one late; of two, one refused
    assert last_of([], np.arange(3.0)) == [0, 0, 0]


def test_what_is_printed_names_what_was_paid_and_what_was_computed() -> None:
    found = result()
    lines = list(figures(found))
    (cost,) = [n for n, line in enumerate(lines) if line.startswith("Cost")]
    # By stage: what a visit is paid times visits a query.
    assert lines[cost] == "Cost: US$ 2e-06 per 1,000 queries, charged (quick 6.06e-08, exact 8.08e-08, check 2.02e-07)."
    assert lines[cost + 1].endswith("computed from what its visits here were charged: 4e-06; with the check: 9e-06.")
    assert "Refused: 1 × deadline." in lines
    deploy, up = [line for line in lines if line.startswith("Tuner")]
    assert deploy == "Tuner at -100.0 s: deploy: quick 0 → 1, exact 0 → 1, check 0 → 1: planned"
    assert up.startswith("Tuner at 50.0 s: up: quick 1 → 4, ")
    by_stage, phases = [block for block in shown(found) if isinstance(block, DemoTable)]
    assert [row["over time"] for row in by_stage.rows] == ["1 → 4"] * 3
    assert [row["load"] for row in phases.rows] == [*(name for name, *_ in PHASES), "in all"]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot (matplotlib)")
    draw(result(), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").stat().st_size > 5000


# -- What the demo's pipeline is made of: the threshold, the check, the file.


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> DemoStages:
    return make_stages(tmp_path_factory.mktemp("stages"))


def verdicts(path: Path, x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "scores": scores})[0]


def test_the_models_together_are_nearly_as_accurate_as_the_accurate_one_alone(stages: DemoStages) -> None:
    seen = load(VALIDATION)
    quick, exact = (scores_of(models()[model], seen.x) for model in (CHEAP, ACCURATE))
    asked = unsure(quick)
    assert stages.share == pytest.approx(asked.mean())
    assert 0.0 < stages.share < 0.5
    both = np.where(asked[:, None], exact, quick)
    together, alone, cheap = ((said.argmax(axis=1) == seen.y).mean() for said in (both, exact, quick))
    assert together >= alone - 0.005 > cheap


def test_the_check_knows_the_nearest_picture_and_doubts_few_right_ones(tmp_path: Path) -> None:
    known = Labelled(np.eye(20, 784, dtype=np.float32) * 9, np.repeat(np.arange(10), 2))
    path = save_nearest(tmp_path / "n.onnx", known)
    said = np.eye(10, dtype=np.float32)
    right = verdicts(path, known.x, said[known.y])
    np.testing.assert_allclose(right.sum(axis=1), 1.0, rtol=1e-5)
    assert (right[:, 1] > 0.9).all()
    assert (verdicts(path, known.x, said[(known.y + 1) % 10])[:, 1] < 0.1).all()
    unseen = load(UNSEEN)
    quick = scores_of(models()[CHEAP], unseen.x)
    right = quick.argmax(axis=1) == unseen.y
    doubted = verdicts(save_nearest(tmp_path / "n.onnx", load(TRAIN)), unseen.x, quick)[:, 1] < 0.5
    assert doubted[~right].mean() > 0.7
    assert doubted[right].mean() < 0.1


def test_the_validation_set_of_the_check_has_right_and_wrong_digits(stages: DemoStages) -> None:
    (checked,) = (validation for app, *_, validation in stages.files if app == APPS["check"])
    with np.load(checked) as stored:
        assert set(stored) == {"x", "scores", "y"}
        assert 0.9 < stored["y"].mean() < 1.0


def test_the_file_is_a_pipeline_without_errors(stages: DemoStages, tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    path.write_text(pipeline_file(stages.share, 42.5))
    found = read_pipeline(path)
    assert not pipeline_errors(found.name, found.latency_ms, found.pipeline, None)
    assert {vertex.app for vertex in found.pipeline.vertices} == {app for app, *_ in stages.files}
    assert found.loads[0].rate == ((0.0, 42.5),)
    (edge,) = [edge for edge in found.pipeline.edges if edge.when is not None]
    assert (edge.when.op, edge.when.value) == ("<", UNSURE)
    assert edge.probability == pytest.approx(stages.share, abs=1e-3)
