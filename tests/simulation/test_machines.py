"""Machines that nobody has at first: what outgrows the others gets one of another kind, and it goes again."""

from services.simulation.run import simulate_all
from tests.support.data.scenario_files import changed, read


def test_a_load_that_outgrows_one_kind_of_machine_gets_another_kind(tmp_path):
    scenario = read(
        tmp_path,
        changed(
            ("scenario.duration_s", 90),
            ("app", [{"name": "faces", "latency_ms": 300}]),
            ("variant.1.app", "faces"),
            ("worker.0.start", 1),
            ("worker.0.max", 1),  # 8 cores: two instances of A, 10/s
            ("worker.1.start", 0),
            ("worker.1.resources", {"gpu_memory_gb": 16}),
            ("worker.1.boot_s", 5),
            ("load", [{"app": "faces", "rate": [[0, 4], [20, 4], [25, 60]]}]),
        ),
    )
    [result] = simulate_all(scenario)["policies"]
    workers = result["series"]["workers"]["gpu"]
    assert workers[0] == 0
    assert max(workers) == 1  # one carries it all
    late = [v for t, v in zip(result["series"]["time"], result["series"]["violations"], strict=True) if t >= 60]
    assert sum(late) == 0
    added = [one for one in result["scaling"]["decisions"] if one["action"] == "add_worker"]
    assert "no worker has room for B" in added[0]["reason"]
