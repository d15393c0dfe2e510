"""`infaas up --simulate`: real CPU variants and simulated ones in one selection, and the mark on everything simulated."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.models import tiny_models
from tests.support.servers.processes import eventually
from tests.support.servers.system import Whole, running

CONFIG = "[registrar]\nthreads = [1]\nmax_batches = [64]\n"
LAYERS = 20  # so that no CPU is quick enough
X, Y = tiny_models.images(64, LAYERS)
SOON_MS = 60  # for 64 items: several times what the GPU is said to take, a fraction of what any CPU variant takes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    root = tmp_path_factory.mktemp("simulated")
    (root / "infaas.toml").write_text(CONFIG)
    np.save(root / "batch.npy", X)
    np.save(root / "one.npy", X[:1])
    options = ("--simulate", "gpu=1,inferentia=1", "--config", str(root / "infaas.toml"))
    with running(root / "data", *options) as whole:
        yield whole


@pytest.fixture(scope="module")
def registered(world: Whole) -> list[dict[str, Any]]:
    """What `infaas register` says of the variants."""
    variants: list[dict[str, Any]] = world.register("convnet", tiny_models.convnet(LAYERS), X, Y)["variants"]
    return variants


def query(world: Whole, file: str, *needs: str) -> dict[str, Any] | None:
    """The answer; None when it was refused."""
    path = str(world.directory.parent / file)
    done = world.command("query", "--app", "convnet", "--input", path, *needs, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_workers_and_variants_say_what_is_simulated(world: Whole, registered: list[dict[str, Any]]) -> None:
    kinds = {"cpu": ("cpu", False, True), "gpu-0": ("gpu", True, True), "inferentia-0": ("inferentia", True, True)}

    def devices() -> dict[str, tuple[Any, ...]]:
        (worker,) = world.told("workers")
        return {one["device"]: (one["kind"], one["simulated"], one["alive"]) for one in worker["devices"]}

    assert eventually(lambda: devices() == kinds), devices()
    for variants in (registered, world.told("variants", "--app", "convnet")):
        marks = {variant["variant"]: (variant["hardware"], variant["simulated"]) for variant in variants}
        assert marks["convnet-v1-ort-fp32-t1-b64"] == ("cpu", False)
        assert marks["convnet-v1-simgpu-fp32-t1-b64"] == ("gpu", True)
        assert marks["convnet-v1-siminferentia-fp32-t1-b8"] == ("inferentia", True)


def test_only_the_gpus_variants_can_be_kept_in_host_memory(world: Whole, registered: list[dict[str, Any]]) -> None:
    assert registered
    tiers = {
        one["variant"]: (one["init_ms"], one["transfer_ms"], one["host_mb"], one["load_ms"], one["memory_mb"])
        for one in world.told("variants", "--app", "convnet")
    }
    init_ms, transfer_ms, host_mb, load_ms, memory_mb = tiers["convnet-v1-simgpu-fp32-t1-b64"]
    assert init_ms + transfer_ms == pytest.approx(load_ms)
    assert transfer_ms == pytest.approx(memory_mb / 2.6)  # 2.6 GB/s: paper 001, section 3.4.1
    assert host_mb == memory_mb
    for other in ("convnet-v1-ort-fp32-t1-b64", "convnet-v1-siminferentia-fp32-t1-b8"):
        assert tiers[other][:3] == (None, None, None)

    def in_sql() -> bool:
        found = world.rows("SELECT variant, init_ms, transfer_ms, host_mb, load_ms, memory_mb FROM infaas.variants")
        return {row[0]: row[1:] for row in found} == tiers

    assert eventually(in_sql)


def test_what_no_cpu_can_do_in_time_goes_to_the_simulated_gpu(world: Whole, registered: list[dict[str, Any]]) -> None:
    gpu = next(variant["variant"] for variant in registered if variant["hardware"] == "gpu")
    assert all(variant["latency_ms"] * 64 > SOON_MS for variant in registered if variant["precision"] == "fp32" and not variant["simulated"])  # fmt: skip
    first = query(world, "one.npy", "--variant", gpu)  # waits for the load
    assert (first["hardware"], first["simulated"]) == ("gpu", True)

    answers: list[dict[str, Any]] = []

    def in_time() -> bool:
        answer = query(world, "batch.npy", "--latency-ms", str(SOON_MS))
        if answer is not None:
            answers.append(answer)
        return bool(answers)

    assert eventually(in_time)
    assert (answers[0]["variant"], answers[0]["simulated"]) == (gpu, True)
    assert "zeros" in answers[0]["reason"]

    plain = query(world, "one.npy", "--variant", "convnet-v1-ort-fp32-t1-b64")
    assert (plain["hardware"], plain["simulated"], plain.get("reason")) == ("cpu", False, None)
    candidates = world.told("explain", "--app", "convnet")["candidates"]
    assert {(one["hardware"], one["simulated"]) for one in candidates} == {("cpu", False), ("gpu", True), ("inferentia", True)}  # fmt: skip

    outcomes = (
        "SELECT hardware, simulated, count(*) > 0 FROM infaas.query_outcomes WHERE outcome <> 'refused' GROUP BY 1, 2"
    )
    assert eventually(lambda: set(world.rows(outcomes)) == {("cpu", False, True), ("gpu", True, True)})
    kinds = "SELECT DISTINCT hardware, simulated, split_part(provenance, ':', 1) FROM infaas.variants"
    expected = {("cpu", False, "measured"), ("gpu", True, "synthetic"), ("inferentia", True, "synthetic")}
    assert eventually(lambda: set(world.rows(kinds)) == expected)


def test_instances_on_a_gpu_take_the_contexts_of_a_rule_and_those_of_inferentia_say_one(
    world: Whole, registered: list[dict[str, Any]]
) -> None:
    """Row 91: what the executor has taken comes back by its reports, the monitor's heartbeats and the dispatcher."""

    def contexts(wanted: int) -> bool:
        query(world, "batch.npy", "--variant", gpu)
        (worker,) = world.told("workers")
        found = {(one["device"], one["contexts"]) for one in worker["instances"]}
        return ("gpu-0", wanted) in found and all(n == 1 for device, n in found if device.startswith("inferentia"))

    gpu = next(one["variant"] for one in registered if one["hardware"] == "gpu")
    assert query(world, "one.npy", "--variant", gpu) is not None  # waits for the load
    world.done("admin", "set-batching", "--model", "convnet", "--policy", "edf", "--contexts", "2")
    assert eventually(lambda: contexts(2))
    world.done("admin", "set-batching", "--model", "convnet")
    assert eventually(lambda: contexts(1))
