from msgspec.structs import replace

from services.gateway.statistics import MAX_BATCH_SIZES, Statistics, statistics_json
from tests.unit.gateway.oip.test_parameters import ANSWER


def test_an_apps_numbers_are_its_variants_and_its_refusals() -> None:
    counts = Statistics()
    counts.answered("a", replace(ANSWER, batch=4), 2, 3e6, 10.0)
    counts.answered("a", replace(ANSWER, batch=4), 2, 5e6, 11.0)
    counts.answered("a", replace(ANSWER, variant="w", cached=True), 1, 1e6, 12.0)
    counts.refused("a", 7e6, 13.0)
    whole, one, two = (statistics_json(*entry) for entry in counts.of("a"))
    assert (whole["name"], one["name"], two["name"]) == ("a", "a.m.v", "a.m.w")
    assert whole["last_inference"] == 13_000
    assert whole["inference_count"] == 5
    assert whole["execution_count"] == 1  # two halves of a batch of four
    assert whole["inference_stats"]["success"] == {"count": 3, "ns": 9_000_000}
    assert whole["inference_stats"]["fail"] == {"count": 1, "ns": 7_000_000}
    assert whole["inference_stats"]["cache_hit"]["count"] == 1
    assert one["batch_stats"] == [
        {
            "batch_size": 4,
            "compute_input": {"count": 0, "ns": 0},
            "compute_infer": {"count": 1, "ns": 1_000_000},
            "compute_output": {"count": 0, "ns": 0},
        }
    ]
    assert two["execution_count"] == 0


def test_by_model_variant_and_version() -> None:
    counts = Statistics()
    counts.answered("a", ANSWER, 1, 1e6, 1.0)
    counts.answered("a", replace(ANSWER, version="2"), 1, 1e6, 1.0)
    counts.answered("b", ANSWER, 1, 1e6, 1.0)

    def items(*about: str | None) -> int:
        return statistics_json(*next(iter(counts.of(*about))))["inference_count"]

    assert items("a") == items("a", "m") == items("a", "m", "v") == 2
    assert items("a", "m", "v", "2") == items("a", None, None, "1") == 1
    assert items("a", "nix") == items("nix") == 0
    assert sorted({name.partition(".")[0] for name, _, _ in counts.all()}) == ["a", "b"]
    assert {name.partition(".")[0] for name, _, _ in counts.all("b")} == {"b"}


def test_a_default_is_its_apps_and_no_execution() -> None:
    counts = Statistics()
    default = replace(ANSWER, model="", version="", variant="", batch=0, compute_ms=0.0, default=True)
    counts.answered("a", default, 2, 3e6, 10.0)
    [whole] = (statistics_json(*entry) for entry in counts.of("a"))
    assert whole["name"] == "a"
    assert whole["inference_stats"]["success"] == {"count": 1, "ns": 3_000_000}
    assert whole["inference_stats"]["compute_infer"]["count"] == 0
    assert (whole["inference_count"], whole["execution_count"], whole["batch_stats"]) == (0, 0, [])


def test_apps_that_are_gone_make_room_for_others() -> None:
    there = {"a", "b"}
    counts = Statistics(there.__contains__)
    for app in ("a", "b", "invented"):
        counts.answered(app, ANSWER, 1, 1e6, 1.0)
        counts.refused(app, 1e6, 1.0)
    there.remove("a")
    there.add("c")
    counts.answered("c", ANSWER, 1, 1e6, 1.0)
    assert {name.partition(".")[0] for name, _, _ in counts.all()} == {"b", "c"}


def test_clients_that_choose_many_sizes_do_not_fill_the_memory() -> None:
    counts = Statistics()
    for items in range(1, 2 * MAX_BATCH_SIZES):
        counts.answered("a", ANSWER, items, 1e6, 1.0)
    whole, one = (statistics_json(*entry) for entry in counts.of("a"))
    assert len(whole["batch_stats"]) == len(one["batch_stats"]) == MAX_BATCH_SIZES
    assert whole["execution_count"] == one["execution_count"] >= 2 * MAX_BATCH_SIZES - 4
