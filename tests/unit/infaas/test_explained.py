"""Why the chosen variant was chosen, in words."""

from typing import Any

import pytest

from infaas.explained import why_chosen


def candidate(variant: str, state: str, cost: float, why_not: str = "") -> dict[str, Any]:
    return {"variant": variant, "state": state, "cost_per_1000": cost, "why_not": why_not}


RIVAL = "meets everything, but a cheaper variant does too"
ABSENT = "not loaded, and an Active variant meets the requirements"


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ([candidate("a", "Active", 1.0)], "meets all needs"),
        ([candidate("a", "Active", 1.0), candidate("b", "Inactive", 0.5, ABSENT)], "the only loaded one"),
        (
            [candidate("a", "Active", 1.0), candidate("b", "Active", 2.0, RIVAL)],
            "the cheapest of those that are loaded",
        ),
        ([candidate("a", "Active", 3.0), candidate("b", "Active", 2.0, RIVAL)], "for accuracy"),
        ([candidate("a", "Loading", 1.0)], "being loaded"),
        ([candidate("a", "Interfered", 1.0)], "Interfered, but in time"),
        ([candidate("a", "Inactive", 1.0)], "would be loaded"),
    ],
)
def test_the_reason_follows_from_the_states_and_costs(candidates: list[dict[str, Any]], told: str) -> None:
    assert told in why_chosen({"chosen": candidates[0], "candidates": candidates})


def test_what_an_older_system_does_not_say_is_not_made_up() -> None:
    assert why_chosen({"chosen": {"variant": "a"}, "candidates": [{"variant": "a"}]}) == "meets all needs"


def test_where_nothing_is_chosen_there_is_no_reason() -> None:
    assert why_chosen({"chosen": None, "candidates": [candidate("a", "Active", 1.0, RIVAL)]}) == ""
