"""The result of `infaas replay` for people: what happened above what would have."""

from collections.abc import Mapping
from math import nan
from typing import Any

from infaas.cli.moments import shown
from infaas.cli.simulated import print_details, print_figures
from infaas.cli.table import number


def print_replay(document: Mapping[str, Any]) -> None:
    """The document of `infaas replay --json`."""
    recorded, runs = document["recorded"], document["policies"]
    of = f", {', '.join(document['apps'])}" if document["apps"] else ""
    print(f"{shown(document['from'])} to {shown(document['to'])} ({number(recorded['duration_s'])} s){of}")
    print(f"machines: {', '.join(_machine(one) for one in document['machines'])}")
    print()
    named = [{**run, "policy": f"{run['policy']} (simulated)"} for run in runs]
    print_figures([recorded, *named])
    print()
    print(f"cost: {document['cost']['text']}")
    if document["cost"]["comparable"] and recorded["cost"]:
        for run in runs:
            print(f"      {run['policy']}: {_against(run['cost'], recorded['cost'])}")
    print_details(runs)
    for note in document["notes"]:
        print(f"note: {note}")
    print("* the best; recorded: what happened; everything else is simulated")


def pictured(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plot.py draws it: what happened is the first of the runs."""
    recorded, runs = document["recorded"], document["policies"]
    series = recorded["series"]
    if any("offline_done" in run["series"] for run in runs):
        series = {**series, "offline_done": [nan] * len(series["time"])}  # nobody recorded when which item was done
    first = {**recorded, "cost": recorded["cost"] or 0.0, "series": series}
    span = f"{shown(document['from'])} to {shown(document['to'])}"
    named = [{**run, "policy": f"{run['policy']} (simulated)"} for run in runs]
    return {**document, "title": f"{span}: recorded, and simulated", "policies": [first, *named]}


def _machine(one: Mapping[str, Any]) -> str:
    most = f" to {one['max']}" if one["max"] != one["start"] else ""
    return f"{one['start']}{most} {one['kind']} at US$ {number(one['price_per_hour'])}/h"


def _against(cost: float, real: float) -> str:
    share = cost / real - 1.0
    if abs(share) < 0.0005:
        return "as much as was paid"
    return f"{abs(100.0 * share):.1f} % {'more' if share > 0 else 'less'} than was paid"
