"""`infaas simulate`: the services' own logic on virtual time; nothing needs to run."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import Json, Names, Whole, names
from infaas.cli.output import fail, for_the_result, print_json, progress, show, usage

if TYPE_CHECKING:
    from services.simulation.scenario.model import Scenario

_PICTURES = (".png", ".svg", ".pdf")


def simulate(
    scenario: Path | None = None,
    /,
    *,
    policy: Names = None,
    seed: Annotated[Whole | None, Parameter(validator=Number(gte=0))] = None,
    plot: Path | None = None,
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Run the services' own logic on virtual time: a scenario's load, machines and faults under one policy or several.

    Prints SLO violations, accuracy, throughput, latency and cost of each policy. The same seed gives the same result.

    Parameters
    ----------
    scenario
        A scenario file (TOML): docs/scenarios.md; an example is docs/examples/scenario.toml.
    policy
        What decides, instead of the file's policies: names of [[policy]] blocks, infaas, infaas-ilp, clipper+ (static),
        sm+ (replicate), round-robin, brute-force, or the import path of your own class.
    seed
        Of arrivals and everything else that chance decides, instead of the file's.
    plot
        Draw what happened into this file (.png, .svg or .pdf); needs the extra `plot`.
    out
        Write the JSON document into this file as well.

    """
    policies = list(names("--policy", policy, "names of policies"))
    if scenario is None and policies and policies[-1].endswith(".toml"):  # `--policy infaas sm+ fig6.toml`
        scenario = Path(policies.pop())
    if scenario is None:
        usage("which scenario? infaas simulate SCENARIO.toml (see infaas simulate --help)")
    writable(plot, out)
    from services.simulation.scenario.read import read_scenario  # noqa: PLC0415  (commands that are not used cost nothing)
    from services.simulation.scenario.toml import ScenarioError  # noqa: PLC0415  (commands that are not used cost nothing)

    try:
        with for_the_result():
            found = read_scenario(scenario, policies=policies, seed=seed)
    except ScenarioError as error:
        usage(str(error))
    document = watch(found)
    keep(document, plot, out)
    show(document, json, _render)
    return 0


def watch(scenario: "Scenario") -> dict[str, Any]:
    """Run it under all its policies and show how far it is; a policy that fails ends the command."""
    from infaas.cli.watching import watched  # noqa: PLC0415
    from services.simulation.run import SimulationError, simulate_all  # noqa: PLC0415

    try:
        with watched([one.name for one in scenario.policies], scenario.duration_s) as told, for_the_result():
            return simulate_all(scenario, told)
    except SimulationError as error:
        if os.environ.get("INFAAS_TRACEBACK"):
            raise
        fail(f"{error} (INFAAS_TRACEBACK=1 shows where)")


def writable(plot: Path | None, out: Path | None, name: str = "--out") -> None:
    """Say before a long run what could not be written after it. name: of the option that says `out`."""
    if plot is not None and plot.suffix.lower() not in _PICTURES:
        usage(f"--plot {plot}: the name must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    if plot is not None and find_spec("matplotlib") is None:
        usage("--plot needs matplotlib, which comes with the extra `plot`: pip install 'infaas[plot]'")
    for option, path in (("--plot", plot), (name, out)):
        if path is None:
            continue
        if not path.parent.is_dir():
            usage(f"{option} {path}: there is no directory {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            usage(f"{option} {path}: cannot be written")


def keep(document: Mapping[str, Any], plot: Path | None, out: Path | None) -> None:
    """Write the document's picture, and the document itself, where that is wanted."""
    if out is not None:
        with out.open("w", encoding="utf-8") as file:
            print_json(document, file)
        progress(f"wrote {out}")
    if plot is not None:
        from services.simulation.plot import draw  # noqa: PLC0415

        draw(document, plot)
        progress(f"wrote {plot}")


def _render(document: Mapping[str, Any]) -> None:
    from infaas.cli.simulated import print_runs  # noqa: PLC0415

    print_runs(document)
