"""The shapes of INFaaS's and InferLine's tables and figures, as their benches find them: short runs, one seed, generous limits."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "paper"))

import compare
import fig1
import fig6
import fig7
import inferline_estimator
import inferline_plans
import inferline_tuner
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
    found = numbers(fig7.build([1], short=True))
    assert found["one GPU at first, a second is added"] == 1.0
    assert 10 < found["the second one is ordered at"] < 70  # for the load that is forecast for when it has booted
    assert found["INFaaS costs less than two dedicated GPUs by"] > 0.05
    assert found["instances are marked Interfered"] == 1.0, "by batches that overlap, and no fault"
    assert 30 < found["the first time, at"] < 70
    assert found["INFaaS misses fewer"] == 1.0
    assert found["peak: the large model's throughput, INFaaS / Clipper+"] > 1.05
    assert found["peak: the small model's throughput, INFaaS / Clipper+"] > 0.85
    assert found["shared GPU: the small model's P99 suffers more, against a GPU of its own"] == 1.0


def test_plans_cost_less_than_whole_pipelines_inferline_figures_5_and_6() -> None:
    found = numbers(inferline_plans.build([1], short=True))
    assert found["CG-Peak costs … times InferLine, at most"] > 2.5
    assert found["CG-Mean costs … times InferLine, at most"] > 1.5
    assert found["InferLine costs no more than CG-Peak, all cases"] == 1.0
    assert found["queries late, InferLine, mean of the cases"] < 0.01
    assert found["queries late, CG-Mean, CV 4"] > 5 * found["queries late, CG-Mean, CV 1"]
    assert found["cost rises or stays with CV 4 instead of 1"] == 1.0
    assert (
        found["CV 4 costs … times CV 1, objective 0.15 s, mean"] > found["CV 4 costs … times CV 1, objective 1 s, mean"]
    )


def test_the_tuner_is_ahead_of_a_ramp_and_of_bursts_inferline_figures_10_and_11() -> None:
    found = numbers(inferline_tuner.build([1], short=True))
    assert found["10, ramp of 60 s: queries late, InferLine"] < 0.01
    assert found["10, ramp of 60 s: … planner only"] > 0.3
    assert found["10, ramp of 60 s: InferLine costs … times the planner that knows"] < 1.05
    assert found["11, CV 1 to 4: queries late, InferLine"] < 0.01
    assert found["all of these: CG-Mean has … times as many late"] > 10
    assert found["all of these: CG-Peak costs … times InferLine"] > 1.3


def test_estimates_hold_for_another_seed_inferline() -> None:
    found = numbers(inferline_estimator.build([1], short=True))
    assert found["P99 against another seed, CV 1: error, largest"] < 0.15
    assert found["P99 against another seed, CV 4: error, largest"] < 0.3
    assert found["P99 against a replay of single batches: largest difference"] < 0.01
    assert found["a minute at 300 queries/s through four stages, CV 4: longest"] < 1.0


def test_a_seed_gives_the_same_run_again() -> None:
    first, again = (
        compare.runs("fig6-fluctuating.toml", [2], duration_s=80.0, policies=["infaas"])[0] for _ in range(2)
    )
    assert compare.bare(first) == compare.bare(again)
