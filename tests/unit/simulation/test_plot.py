"""The picture of a simulation: there for any number of policies and variants, and nothing is left out of it in silence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.data.simulation_reports import document

pytest.importorskip("matplotlib", reason="needs the extra plot (matplotlib)")
from services.simulation import plot


def texts(figure: Any) -> list[str]:
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    shown = [text.get_text() for legend in legends for text in legend.get_texts()]
    return [*shown, *(axes.get_title() for axes in figure.axes)]


def lines(figure: Any, label: str) -> list[Any]:
    return [line for axes in figure.axes for line in axes.lines if line.get_label() == label]


def test_one_policy_with_few_variants(tmp_path: Path) -> None:
    of = document(1, 3)
    plot.draw(of, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    figure = plot.picture(of)
    assert "simulated" in figure.get_suptitle()
    shown = texts(figure)
    assert {"offered", "answered", "late or refused", "cost rate", "spent so far", "cpu", "gpu", "inferentia"} <= set(
        shown
    )
    assert "network2-v1-ort-fp32-t2-b4" in shown
    assert not any("others" in text or "other policies" in text for text in shown)


def test_many_variants_and_policies() -> None:
    shown = texts(plot.picture(document(4, 26)))
    assert "15 others" in shown
    assert sum("network" in text for text in shown) == plot.SHOWN - 1
    titles = [text.splitlines()[0] for text in shown if text.startswith("policy-")]
    assert titles == ["policy-0", "policy-1", "policy-2", "policy-3"]


def test_stacks_are_as_high_as_instances_and_money_ends_at_the_cost() -> None:
    of = document(1, 26)
    total = np.sum(list(of["policies"][0]["series"]["instances"].values()), axis=0).max()
    panel = next(axes for axes in plot.picture(of).axes if axes.get_ylabel() == "instances")
    assert max(layer.get_paths()[0].vertices[:, 1].max() for layer in panel.collections) == total
    of = document(2, 2)
    ends = [line.get_ydata()[-1] for line in lines(plot.picture(of), "spent so far")]
    assert ends == pytest.approx([run["cost"] for run in of["policies"]])


def test_long_runs_are_thinned_and_end_where_they_end() -> None:
    of = document(1, 2, duration=1400.0, every=2.0, qps=1.0)
    assert len(of["policies"][0]["series"]["time"]) == 700
    (line,) = lines(plot.picture(of), "offered")
    assert len(line.get_xdata()) <= plot.POINTS + 1
    assert line.get_xdata()[-1] == pytest.approx(1400 / 60)
    assert np.mean(line.get_ydata()[:-1]) == pytest.approx(of["policies"][0]["queries"] / 1400, rel=0.02)


def test_offline_work_has_a_row_where_there_is_some() -> None:
    of = document(2, 2)
    assert lines(plot.picture(of), "outputs of jobs") == []
    series = of["policies"][1]["series"]
    series["offline_done"] = [3.0] * len(series["time"])
    without, with_jobs = lines(plot.picture(of), "outputs of jobs")
    assert (max(without.get_ydata()), max(with_jobs.get_ydata())) == (0.0, 3.0)


@pytest.mark.parametrize(("name", "begin"), [("run.svg", b"<?xml"), ("run.pdf", b"%PDF-")])
def test_the_suffix_decides_the_format(name: str, begin: bytes, tmp_path: Path) -> None:
    plot.draw(document(1, 1), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_a_run_in_which_nothing_happened(tmp_path: Path) -> None:
    of = document(1, 1, duration=2.0, qps=0.001)
    run = of["policies"][0]
    run |= {"effective_accuracy": None, "cost": 0.0}
    run["series"] |= {"cost_rate": [0.0], "instances": {}, "workers": {}, "effective_accuracy": [None]}
    plot.draw(of, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
