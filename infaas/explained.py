"""What an explanation says about the variant that was chosen. Pure."""

from collections.abc import Mapping
from typing import Any

_FITS = "meets everything"  # how reasons of loaded variants begin that would have done as well


def why_chosen(explanation: Mapping[str, Any]) -> str:
    """Why the chosen candidate of `infaas.explain` comes before all others, in words; "" when none was chosen."""
    chosen = explanation.get("chosen")
    if not chosen:
        return ""
    candidates = explanation.get("candidates") or []
    chosen = next((each for each in candidates if each.get("variant") == chosen.get("variant")), chosen)
    others = [each for each in candidates if each is not chosen]
    match chosen.get("state"):
        case "Active":
            rivals = [each for each in others if str(each.get("why_not", "")).startswith(_FITS)]
            if not rivals:
                return "the only loaded one that meets all needs" if others else "meets all needs"
            if all(chosen.get("cost_per_1000", 0.0) <= each.get("cost_per_1000", 0.0) for each in rivals):
                return "the cheapest of those that are loaded and meet all needs"
            return "the first, for accuracy, of those that are loaded and meet all needs"
        case "Loading":
            return "it is being loaded, and in time; nothing that is loaded meets all needs"
        case "Overloaded" | "Interfered" as state:
            return f"{state}, but in time; no Active one is"
        case None:
            return "meets all needs"
    return "it would be loaded, being ready soonest; nothing that is loaded meets all needs"
