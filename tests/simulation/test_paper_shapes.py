"""The shapes of INFaaS's tables and figures, as its benches find them: short runs, one seed, generous limits."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "paper"))

import compare
import fig1
import fig6
import fig7
import table23

pytestmark = pytest.mark.slow


def numbers(figure: compare.Figure) -> Mapping[str, float]:
    return {row.what: row.mean for row in figure.rows}


def test_tables_2_and_3_are_exact() -> None:
    assert all(row.good for row in table23.build().rows)


def test_two_models_on_one_gpu_figure_1() -> None:
    figure = fig1.build([1], short=True)
    assert all(row.good for row in figure.rows)


def test_a_flat_low_load_is_served_by_cpus_figure_6a() -> None:
    runs = compare.runs("fig6-low.toml", [1], duration_s=60.0)
    ours = compare.of(runs[0], "infaas")
    assert set(ours["variants"]) == {"resnet50-tf-cpu"}
    assert fig6.carried(ours) > 0.95
    assert fig6.dearer(runs, "clipper+gpu")[0] > 8
    assert fig6.dearer(runs, "sm+gpu")[0] > 8


def test_a_fluctuating_load_goes_to_inferentia_and_back_figure_6c() -> None:
    names = ["infaas", "infaas, no inferentia", "clipper+gpu", "clipper+inferentia", "clipper+cpu"]
    runs = compare.runs("fig6-fluctuating.toml", [1], policies=names)
    ours = compare.of(runs[0], "infaas")
    assert fig6.course(ours) == ["cpu", "inferentia", "cpu", "inferentia", "cpu"]
    assert fig6.carried(ours) > 0.98
    assert fig6.dearer(runs, "clipper+gpu")[0] > 2.0
    assert fig6.dearer(runs, "clipper+inferentia")[0] > 1.3
    assert fig6.dearer(runs, "clipper+gpu", "infaas, no inferentia")[0] > 1.4
    assert fig6.carried(compare.of(runs[0], "clipper+cpu")) < 0.5


def test_a_high_load_goes_to_the_gpu_in_batches_figure_6b() -> None:
    runs = compare.runs(
        "fig6-high.toml", [1], duration_s=20.0, policies=["infaas", "clipper+gpu", "sm+gpu", "clipper+cpu"]
    )
    ours = compare.of(runs[0], "infaas")
    assert max(ours["variants"], key=ours["variants"].__getitem__) == "resnet50-trt-b8"
    assert fig6.carried(ours, since=12.0) > 0.98
    assert fig6.carried(compare.of(runs[0], "clipper+gpu")) > 0.99
    assert fig6.carried(compare.of(runs[0], "sm+gpu")) < 0.85
    assert 8 < fig6.served(compare.of(runs[0], "clipper+cpu")) < 12


def test_gpus_are_shared_until_one_is_not_enough_figure_7() -> None:
    figure = fig7.build([1], short=True)
    found = numbers(figure)
    assert found["one GPU at first, a second is added"] == 1.0
    assert 10 < found["the second one is ordered at"] < 70  # for the load that is forecast for when it has booted
    assert found["INFaaS costs less than two dedicated GPUs by"] > 0.1
    assert found["INFaaS misses fewer"] == 1.0
    assert found["peak: the large model's throughput, INFaaS / Clipper+"] > 1.05
    assert found["peak: the small model's throughput, INFaaS / Clipper+"] > 0.85
    assert found["shared GPU: the small model's P99 suffers more, against a GPU of its own"] == 1.0


def test_a_seed_gives_the_same_run_again() -> None:
    first, again = (
        compare.runs("fig6-fluctuating.toml", [2], duration_s=80.0, policies=["infaas"])[0] for _ in range(2)
    )
    assert compare.bare(first) == compare.bare(again)
