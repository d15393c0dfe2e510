"""Clipper's REST as its users speak it: curl, against a running system."""

import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.support.gateways.curl import LABELS, Place, Said, blob, curl, fine
from tests.support.models import poison_models, tiny_models
from tests.support.servers.processes import eventually

SLO_MS = 600
ROUNDS = 1_000_000  # of the poisoned model: several times the objective


def predicted(place: Place, app: str, item: list[float], wanted: Callable[[Any], bool]) -> Any:
    """Predict until it is so: variants are loaded by the first queries, and dispatchers hear of a change a moment later."""
    found: list[Any] = []

    def ask() -> bool:
        found.append(fine(place, f"/{app}/predict", {"input": item}))
        return wanted(found[-1])

    assert eventually(ask), found[-1]
    return found[-1]


def answered(place: Place, app: str, item: list[float], version: str) -> Any:
    return predicted(place, app, item, lambda said: not said["default"] and said["version"] == version)


def defaulted(place: Place, app: str, item: list[float], why: str) -> Any:
    return predicted(place, app, item, lambda said: said["default"] is True and why in said["default_explanation"])


def test_a_session_in_clippers_words(place: Place) -> None:
    x, y = tiny_models.digits(20)
    one, item = int(y[0]), x[0].tolist()
    bad = x[0].copy()
    bad[0] = poison_models.POISON
    assert fine(place, "/admin/ping") == "PONG"

    app = {"name": "compass", "input_type": "floats", "default_output": "-1", "latency_slo_micros": 1000 * SLO_MS}
    assert fine(place, "/admin/add_app", app) == "Success!"
    again = curl(place, "/admin/add_app", app)
    assert again.status == 400
    assert set(again.body) == {"error", "cause"}
    known = partial(fine, place, "/admin/get_application", {"name": "compass"})
    assert eventually(lambda: known() == {**app, "linked_models": []}), known()
    assert eventually(lambda: "compass" in fine(place, "/admin/get_all_applications", {}))
    nothing = defaulted(place, "compass", item, "serves no model")
    assert nothing["output"] == -1
    assert isinstance(nothing["query_id"], int)

    # version 2 beside version 1: it is as accurate, and sleeps on one input
    validation = blob(tiny_models.npz(x=tiny_models.digits()[0], y=tiny_models.digits()[1]))
    new = {"model_name": "needle", "input_type": "floats", "labels": LABELS, "validation": validation, "batch_size": -1}
    fine(place, "/admin/add_model", {**new, "model_version": 1, "model": blob(tiny_models.mlp())})
    fine(place, "/admin/add_model", {**new, "model_version": 2, "model": blob(poison_models.hanging(0, ROUNDS))})
    models = partial(fine, place, "/admin/get_all_models", {"verbose": False})
    assert eventually(lambda: {"needle:1", "needle:2"} <= set(models())), models()
    fine(place, "/admin/add_model_links", {"app_name": "compass", "model_names": ["needle"]})
    assert eventually(lambda: fine(place, "/admin/get_linked_models", {"app_name": "compass"}) == ["needle"])
    fine(place, "/admin/set_model_version", {"model_name": "needle", "model_version": "1"})
    first = partial(fine, place, "/admin/get_model", {"model_name": "needle", "model_version": "1"})
    assert eventually(lambda: first()["is_current_version"])
    assert first()["labels"] == list(LABELS)

    good = answered(place, "compass", item, "1")
    assert int(np.argmax(good["output"])) == one
    batch: list[Any] = []

    def all_answered() -> bool:  # within the app's objective
        batch[:] = fine(place, "/compass/predict", {"input_batch": x[:5].tolist()})["batch_predictions"]
        return not any(each["default"] for each in batch)

    assert eventually(all_answered), batch
    assert [int(np.argmax(each["output"])) for each in batch] == y[:5].tolist()
    assert {each["version"] for each in batch} == {"1"}
    assert len({each["query_id"] for each in batch}) == 5
    containers = partial(fine, place, "/admin/get_all_containers", {"verbose": True})
    assert eventually(lambda: any(each["model_id"] == "needle:1" for each in containers())), containers()

    # forward, into trouble, and back, while everything runs
    fine(place, "/admin/set_model_version", {"model_name": "needle", "model_version": "2"})
    answered(place, "compass", item, "2")
    slept: list[Said] = []

    def waited() -> bool:  # and was not refused at once, since the machine is too busy
        slept.append(curl(place, "/compass/predict", {"input": bad.tolist()}))
        assert (slept[-1].status, slept[-1].body["output"], slept[-1].body["default"]) == (200, -1, True)
        assert slept[-1].body["default_explanation"]
        return slept[-1].seconds >= 0.9 * SLO_MS / 1000

    assert eventually(waited), slept[-1]
    fine(place, "/admin/set_model_version", {"model_name": "needle", "model_version": "1"})
    answered(place, "compass", item, "1")

    assert fine(place, "/compass/update", {"uid": "u1", "input": item, "label": one}) == "Feedback received? 1"
    seen = "SELECT count(*) FROM infaas.feedback WHERE app = 'compass' AND context = 'u1'"
    assert eventually(lambda: place.system.rows(seen) == [(1,)])
    ends = "SELECT DISTINCT outcome FROM infaas.query_outcomes WHERE app = 'compass'"
    assert eventually(lambda: ("default",) in place.system.rows(ends))

    fine(place, "/admin/delete_model_links", {"app_name": "compass", "model_names": ["needle"]})
    defaulted(place, "compass", item, "serves no model")
    fine(place, "/admin/delete_versioned_model", {"model_name": "needle", "model_version": "2"})
    assert eventually(lambda: "needle:2" not in models()), models()
    counted = fine(place, "/clipper/metrics")["counters"]
    assert any("app:compass:num_predictions" in each for each in counted)
    fine(place, "/admin/delete_app", {"name": "compass"})
    gone = partial(curl, place, "/compass/predict", {"input": item})
    assert eventually(lambda: gone().status == 404), gone()
    assert set(gone().body) == {"error", "cause"}


def test_a_target_is_set_over_http_and_a_wrong_one_refused(place: Place) -> None:
    fields = {"name": "aimed", "input_type": "floats", "default_output": "0", "latency_slo_micros": 50000}
    fine(place, "/admin/add_app", fields)
    fine(place, "/admin/set_target", {"name": "aimed", "slo_target": 0.999})
    assert place.system.command("admin", "set-target", "--app", "aimed", "--slo-target", "1.5").returncode == 1
    assert "above 0 and below 1" in curl(place, "/admin/set_target", {"name": "aimed", "slo_target": 99}).body["cause"]

    def target() -> Any:
        return [app["slo_target"] for app in place.system.told("apps", "--app", "aimed")]

    assert eventually(lambda: target() == [0.999]), target()
    assert place.system.done("admin", "set-target", "--app", "aimed", "--slo-target", "0.9") == "done\n"
    assert eventually(lambda: target() == [0.9]), target()
    fine(place, "/admin/delete_app", {"name": "aimed"})


def test_batching_is_set_while_instances_serve_and_a_wrong_rule_refused(place: Place) -> None:
    fields = {"name": "boxed", "input_type": "floats", "default_output": "0", "latency_slo_micros": 1000 * SLO_MS}
    fine(place, "/admin/add_app", fields)
    fine(place, "/admin/add_model_links", {"app_name": "boxed", "model_names": ["logreg"]})
    answered(place, "boxed", [0.0] * 784, "1")

    def batching() -> set[tuple[str, int]]:
        workers = place.system.told("workers")
        found = [one for worker in workers for one in worker["instances"] if one["variant"].startswith("logreg-")]
        return {(one["batching"], one["batch_limit"]) for one in found}

    def sizes() -> set[int]:
        containers = fine(place, "/admin/get_all_containers", {"verbose": True})
        return {one["batch_size"] for one in containers if one["model_name"] == "logreg"}

    def shown() -> set[str]:
        items = place.system.told("variants", "--app", "boxed")
        return {one["batching"] for one in items if one["instances"]}

    assert eventually(lambda: {policy for policy, _ in batching()} == {"edf"}), batching()
    fine(place, "/admin/set_batching", {"model": "logreg", "policy": "fixed", "batch": 3})
    assert eventually(lambda: batching() == {("fixed", 3)}), batching()
    assert eventually(lambda: sizes() == {3}), sizes()
    assert eventually(lambda: shown() == {"fixed"}), shown()
    said = curl(place, "/admin/set_batching", {"model": "logreg", "policy": "threshold", "quantum_ms": 0})
    assert (said.status, "quantum_ms: must be at least 0.5 and" in said.body["cause"]) == (400, True), said.body
    assert place.system.command("admin", "set-batching", "--model", "logreg", "--policy", "delayed").returncode == 1

    # Row 92: tuned while it serves, and the rule outlives the process that follows it
    before = place.system.pids("executor")
    tuned = fine(place, "/change_params?quanta=20&batchSize=16&model_name=logreg")
    assert (tuned["success"], tuned["error"]) == (True, "")
    # Which variants are loaded is the machine's affair; those for batches of 8 keep their own limit.
    assert eventually(lambda: batching() <= {("threshold", 8), ("threshold", 16)}), batching()
    rule = ("--policy", "threshold", "--quantum-ms", "2", "--batch", "5", "--contexts", "1")
    assert place.system.done("admin", "set-batching", "--model", "logreg", *rule) == "done\n"
    assert eventually(lambda: batching() == {("threshold", 5)}), batching()
    answered(place, "boxed", [0.0] * 784, "1")
    assert place.system.pids("executor") == before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not {*before} & {*place.system.pids("executor")})
    answered(place, "boxed", [0.0] * 784, "1")
    assert eventually(lambda: batching() == {("threshold", 5)}), batching()
    assert "there is no model 'nobody'" in curl(place, "/change_params?quanta=5&model_name=nobody").body["error"]
    assert curl(place, "/change_params?quanta=0").status == 400

    assert place.system.done("admin", "set-batching", "--model", "logreg") == "done\n"
    assert eventually(lambda: {policy for policy, _ in batching()} == {"edf"}), batching()
    fine(place, "/admin/delete_app", {"name": "boxed"})


def test_a_selection_is_set_over_http_and_a_wrong_one_refused(place: Place) -> None:
    def selection() -> list[Any]:
        return [app["selection"] for app in place.system.told("apps", "--app", "several")]

    fields = {"name": "several", "input_type": "floats", "default_output": "0", "latency_slo_micros": 50000}
    fine(place, "/admin/add_app", fields)
    fine(place, "/admin/add_model_links", {"app_name": "several", "model_names": ["logreg"]})
    assert eventually(lambda: selection() == [None]), selection()
    fine(place, "/admin/set_selection", {"name": "several", "policy": "exp4", "members": ["logreg"], "eta": 1})
    given = {
        "policy": "exp4", "members": ["logreg"], "eta": 1.0, "contextual": False, "confidence": 0.0, "wait_share": 0.97,
        "cache_mb": 0.0,
    }  # fmt: skip
    assert eventually(lambda: selection() == [given]), selection()
    for user in ({}, {"uid": "u1"}, {"uid": 7}):
        [learnt] = fine(place, "/admin/get_state", {"app_name": "several", **user})
        assert (learnt["member"], learnt["probability"], learnt["n"]) == ("logreg", 1.0, 0)
    unknown = curl(place, "/admin/get_state", {"app_name": "nobody"})
    assert (unknown.status, "no application" in unknown.body["cause"]) == (400, True)
    for wrong, word in (
        ({"policy": "exp4", "members": ["nobody"]}, "members: app several does not link nobody; it links logreg"),
        ({"policy": "exp4", "members": [1]}, "members[0]: must be a text"),
    ):
        said = curl(place, "/admin/set_selection", {"name": "several", **wrong})
        assert (said.status, word in said.body["cause"]) == (400, True), (wrong, said.body)
    unlink = curl(place, "/admin/delete_model_links", {"app_name": "several", "model_names": ["logreg"]})
    assert (unlink.status, "use set-selection" in unlink.body["cause"]) == (400, True)
    assert place.system.told("admin", "set-selection", "several", "--cache-mb", "8") == {"done": True}
    assert eventually(lambda: "cache 8 MB" in place.system.command("apps", "--app", "several", "--wide").stdout)

    def infer(value: float, **needs: float) -> Any:
        given = {"name": "x", "datatype": "FP32", "shape": [1, 784], "data": [value] * 784}
        return fine(place, "/v2/models/several/infer", {"inputs": [given], "parameters": needs})["parameters"]

    numbers = itertools.count()
    assert eventually(lambda: "default" not in infer(next(numbers), latency_ms=60_000))
    first, again = infer(0.5, latency_ms=60_000), infer(0.5, latency_ms=60_000)
    assert (first["cached"], again["cached"], again["cost"], again["model"]) == (False, True, 0, "logreg")
    assert first["query"] != again["query"]
    fine(place, "/admin/set_selection", {"name": "several", "policy": "majority", "cache_mb": 8})
    assert eventually(lambda: "members" in infer(next(numbers), latency_ms=60_000))
    member = infer(0.25, latency_ms=60_000, confidence=1)
    assert (member["members"], member["missing"], member["confidence"], member["missed"]) == ("logreg@1", 0, 1, "")
    assert curl(place, "/v2/models/several/infer", {"inputs": [], "parameters": {"confidence": 2}}).status == 400
    fine(place, "/admin/set_selection", {"name": "several"})
    assert eventually(lambda: selection() == [None]), selection()
    assert eventually(lambda: fine(place, "/admin/get_state", {"app_name": "several"}) == [])
    fine(place, "/admin/delete_app", {"name": "several"})
