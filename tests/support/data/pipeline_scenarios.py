"""Scenario files in which a pipeline of tests or benches runs in the simulator."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import UNSET

from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.problem import PipelineProblem, StageOption


def write_scenario(
    folder: Path,
    problem: PipelineProblem,
    load: Mapping[str, object],
    workers: Mapping[str, int],
    *,
    duration_s: float,
    patient: bool = False,
    seconds: float | None = None,
) -> Path:
    """The file of a scenario: the problem's pipeline, variants for its options, and this load.

    workers: devices by kind of hardware, each a machine with one core. patient: queries wait for their answers however long they take,
    though the plan is for the problem's objective. seconds: of the load, for which the plan is made.
    """
    planned = "" if seconds is None else f"seconds = {seconds}\n"
    (folder / "pipeline.toml").write_text(_pipeline(problem) + planned)
    blocks = [
        f"[scenario]\nduration_s = {duration_s}\nmetrics_every_s = {min(10.0, duration_s)}",
        '[[pipeline]]\nfile = "pipeline.toml"',
        *(_variant(option) for option in problem.options),
        *(
            f'[[worker]]\nkind = "{kind}"\ndevices = {{ {kind} = 1 }}\nprice_per_hour = 0.1\nstart = {count}\nmin = {count}'
            for kind, count in workers.items()
        ),
        f'[[load]]\napp = "{problem.name}"\n' + "\n".join(f"{key} = {_text(value)}" for key, value in load.items()),
    ]
    if patient:
        blocks[-1] += "\nlatency_ms = 1e6"
    file = folder / "scenario.toml"
    file.write_text("\n".join(blocks) + "\n")
    return file


def _pipeline(problem: PipelineProblem) -> str:
    record = problem.pipeline
    graph = PipelineGraph(record)
    first = graph.sources[0]
    blocks = [
        f'[pipeline]\nname = "{problem.name}"\nlatency_ms = {problem.latency_ms}',
        *(
            f'[[vertex]]\nname = "{one.name}"\napp = "{one.name}"\ninputs = {{ x = "{one.inputs.get("x", "$.x")}" }}'
            + ("" if one.accuracy is None else f"\naccuracy = {one.accuracy}")
            for one in record.vertices
        ),
        *(
            f'[[edge]]\nfrom = "{one.source}"\nto = "{one.target}"'
            + ("" if one.probability is None else f"\nprobability = {one.probability}")
            + "".join(
                f"\n{key} = {_text(value)}"
                for key in ("items", "items_mean", "items_dispersion", "items_max")
                if (value := getattr(one, key)) is not UNSET
            )
            for one in record.edges
        ),
        "[output]\n" + "\n".join(f'{name} = "{name}.y | {first}.y"' for name in graph.sinks if name != first),
        f"[plan]\npercentile = {problem.percentile}",
    ]
    return "\n".join(blocks) + "\n"


def _variant(option: StageOption) -> str:
    table = ", ".join(f"{size} = {ms}" for size, ms in option.batch_latency_ms.items())
    name = "-".join(filter(None, (option.vertex, option.variant, option.hardware)))
    lines = [
        f'[[variant]]\napp = "{option.vertex}"\nname = "{name}"\nhardware = "{option.hardware}"',
        f"batch_latency_ms = {{ {table} }}\ncost_per_s = {option.price_per_hour / 3600.0}",
    ]
    if option.accuracy is not None:
        lines.append(f"accuracy = {option.accuracy}")
    return "\n".join(lines)


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
