"""Every scenario that ever broke an invariant, shrunk: it is sound now, or is known to be broken still."""

import tomllib
from pathlib import Path

import pytest

from services.simulation.fuzz.trial import tried
from services.simulation.scenario.read import read_scenario

HERE = Path(__file__).parent
FAILED: list[dict[str, object]] = tomllib.loads((HERE / "failed.toml").read_text()).get("failed", [])


@pytest.mark.parametrize("one", FAILED, ids=lambda one: f"{one['invariant']}-{one['scenario']}")
def test_what_once_failed(one: dict[str, object]) -> None:
    broken = {found.invariant for found in tried(read_scenario(HERE / str(one["scenario"]))).violations}
    if one.get("known"):
        assert one["invariant"] in broken, "it is mended: take `known` away in failed.toml"
    else:
        assert broken == set()


def test_every_file_is_in_the_list() -> None:
    assert {one["scenario"] for one in FAILED} == {file.name for file in HERE.glob("seed-*.toml")}
    assert all(one["cause"] for one in FAILED)
