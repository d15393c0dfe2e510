"""Every scenario that ever broke an invariant, shrunk: it is sound now, or is known to be broken still."""

import tomllib
from pathlib import Path

import pytest

from services.simulation.fuzz.trial import tried
from services.simulation.scenario.read import read_scenario

HERE = Path(__file__).parent
FAILED: list[dict[str, object]] = tomllib.loads((HERE / "failed.toml").read_text()).get("failed", [])
LONG_S = 25.0  # of simulated time: three quarters of the computing


def marked(one: dict[str, object]) -> object:
    text = (HERE / str(one["scenario"])).read_text()
    long = tomllib.loads(text)["scenario"]["duration_s"] > LONG_S
    return pytest.param(one, id=f"{one['invariant']}-{one['scenario']}", marks=[pytest.mark.slow] if long else [])


@pytest.mark.parametrize("one", [marked(one) for one in FAILED])
def test_what_once_failed(one: dict[str, object]) -> None:
    broken = {found.invariant for found in tried(read_scenario(HERE / str(one["scenario"]))).violations}
    if one.get("known"):
        assert one["invariant"] in broken, "it is mended: take `known` away in failed.toml"
    else:
        assert broken == set()


def test_every_file_is_in_the_list() -> None:
    assert {one["scenario"] for one in FAILED} == {file.name for file in HERE.glob("seed-*.toml")}
    assert all(one["cause"] for one in FAILED)
