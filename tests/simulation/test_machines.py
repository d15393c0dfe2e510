"""Machines that nobody has at first: what outgrows the others gets one of another kind, and it goes again."""

from services.simulation.run import simulate_all
from tests.support.data.scenario_files import changed, read


def test_a_load_that_outgrows_one_kind_of_machine_gets_another_kind(tmp_path):
    scenario = read(
        tmp_path,
        changed(
            ("scenario.duration_s", 130),
            ("app", [{"name": "faces", "latency_ms": 1000}]),
            ("variant.1.app", "faces"),
            ("worker.0.start", 1),
            ("worker.0.max", 1),  # 8 cores: two instances of A, 10/s
            ("worker.1.start", 0),
            ("worker.1.resources", {"gpu_memory_gb": 16}),
            ("worker.1.boot_s", 5),
            ("load", [{"app": "faces", "rate": [[0, 0.5], [90, 0.5], [95, 60]]}]),
        ),
    )
    [result] = simulate_all(scenario)["policies"]
    workers = dict(zip(result["series"]["time"], result["series"]["workers"]["gpu"], strict=True))
    assert workers[88.0] == 0  # one that the first queries brought, of which little is known, has gone
    assert workers[128.0] == max(workers.values()) == 1  # one carries it all
    violations = zip(result["series"]["time"], result["series"]["violations"], strict=True)
    assert sum(count for t, count in violations if t < 90 or t >= 102) == 0
    [added] = [row for row in result["scaling"]["decisions"] if row["action"] == "add_worker" and row["time"] > 0]
    assert added["reason"].startswith("the plan wants 1 gpu, there are 0, for ")
    assert 90.0 < added["time"] < 94.0
