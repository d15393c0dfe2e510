"""The graph that a driver's runs show (InferLine, paper 004, section 3.2): stages, what depends on what, scale factors, and its file."""

import asyncio
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from infaas.answers import Answer
from infaas.errors import BadInput
from infaas.pipelines import Driver, DriverRun, RpcCall, follow
from services.core.toml import key_text, quoted

if TYPE_CHECKING:
    from bus.tensors import Array
    from infaas.client import Client

QUERY = "$"
AT_ONCE = 8  # samples that are traced at a time


class TracedStage:
    """A vertex. visits: in all runs. most: in one run. inputs: by name, where it came from, the alternatives as a set; None: not seen."""

    def __init__(self, app: str, accuracy: float | None) -> None:
        self.app = app
        self.accuracy = accuracy
        self.visits = 0
        self.most = 0
        self.inputs: dict[str, set[str | None]] = defaultdict(set)


class PipelineTrace:
    """The graph that the runs of a driver show. queries: how many there were. stages: by name. edges: from stage to stage, with how many runs
    visited both. output: as a stage's inputs. seconds: of the slowest run.
    """

    def __init__(self, inputs_of: Mapping[str, Sequence[str]]) -> None:
        """inputs_of: the names of each app's inputs."""
        self._inputs_of = inputs_of
        self._names: dict[tuple[str, str, tuple[str, int] | None], str] = {}
        self._runs: list[tuple[frozenset[str], dict[str, str | None]]] = []  # what was visited, whence the outputs came
        self.queries = 0
        self.seconds = 0.0
        self.stages: dict[str, TracedStage] = {}
        self.edges: Counter[tuple[str, str]] = Counter()
        self.output: dict[str, set[str | None]] = defaultdict(set)
        self._both: Counter[tuple[str, str]] = Counter()

    @property
    def scale(self) -> dict[str, float]:
        """By stage, its visits for each query of the pipeline."""
        return {name: stage.visits / self.queries for name, stage in self.stages.items()}

    def probability(self, source: str, target: str) -> float:
        """The share of the runs that visit the source that visit the target too."""
        runs = sum(source in visited for visited, _ in self._runs)
        return self._both[source, target] / runs

    def add(self, one: DriverRun) -> None:
        """Count one run."""
        self.queries += 1
        self.seconds = max(self.seconds, one.seconds)
        known = _named(QUERY, one.x)
        names = {id(call): self._name(call) for call in one.calls}
        for call in one.calls:
            stage = self.stages.setdefault(names[id(call)], TracedStage(call.app, call.accuracy))
            stage.visits += 1
            for field, source in self._sources(call, known).items():
                stage.inputs[field].add(source)
            if call.answer is not None:
                known += [(f"{names[id(call)]}.{field}", array) for field, array in call.answer.outputs.items()]
        visited = Counter(names.values())
        for name, count in visited.items():
            self.stages[name].most = max(self.stages[name].most, count)
        for call in one.calls:
            for earlier in _direct(call):
                pair = names[id(earlier)], names[id(call)]
                if pair[0] != pair[1]:
                    self.edges[pair] += 1
        self._both.update((a, b) for a in visited for b in visited if a != b)
        given = {field: _source(array, known) for field, array in _outputs(one.returned).items()}
        for field, found in given.items():
            self.output[field].add(found)
        self._runs.append((frozenset(visited), given))

    def _name(self, call: RpcCall) -> str:
        """The stage's own name, or the app's; another line of the driver that asks the same app is another stage."""
        key = (call.app, call.stage, None if call.stage else call.site)
        if key not in self._names:
            base, taken = call.stage or call.app, set(self._names.values())
            number = 1
            while (name := base if number == 1 else f"{base}-{number}") in taken:
                number += 1
            self._names[key] = name
        return self._names[key]

    def _sources(self, call: RpcCall, known: "list[tuple[str, Array]]") -> dict[str, str | None]:
        if isinstance(call.inputs, Mapping):
            return {str(field): _source(value, known) for field, value in call.inputs.items()}
        names = self._inputs_of.get(call.app, ())
        return {names[0] if len(names) == 1 else "x": _source(call.inputs, known)}

    # -- as a file

    def to_toml(self, name: str) -> str:
        """A pipeline's file. What the runs do not show is left out, or marked in a comment that begins with TODO."""
        slowest = 1000.0 * self.seconds
        lines = [
            f"# Traced from {self.queries} runs of a driver; the slowest took {slowest:.3g} ms.",
            "[pipeline]",
            f"name = {quoted(name)}",
            f"latency_ms = {max(1, ceil(2.0 * slowest))}  # TODO: twice the slowest run; state your objective",
        ]
        order = self._order()
        for stage in order:
            lines += self._vertex(stage, self.stages[stage], order)
        for source, target in sorted(self.edges, key=lambda pair: (order.index(pair[0]), order.index(pair[1]))):
            lines += self._edge(source, target)
        lines += ["", "[output]"]
        for field, sources in self.output.items():
            lines += self._assigned(field, sources, order, self._runs)
        if not self.output:
            lines.append(
                '# TODO: the driver returned no tensors of the query or of a stage: name at least one, as y = "STAGE.y"'
            )
        return "\n".join(lines) + "\n"

    def _vertex(self, name: str, stage: TracedStage, order: list[str]) -> list[str]:
        scale = stage.visits / self.queries
        lines = ["", "[[vertex]]", f"name = {quoted(name)}", f"app = {quoted(stage.app)}"]
        lines[1] += f"  # {scale:.4g} visits for each query"
        if stage.most > 1:
            lines.append(
                f"# TODO: up to {stage.most} visits in a run; a pipeline visits each stage once: make a stage of each"
            )
        seen = {field: sources for field, sources in stage.inputs.items() if None not in sources}
        parts = [f"{key_text(field)} = {quoted(self._reference(sources, order))}" for field, sources in seen.items()]
        lines.append(f"inputs = {{ {', '.join(parts)} }}" if parts else "inputs = {}")
        lines += [
            f"# TODO: {key_text(field)} is computed by the driver's own code: put an app before this stage that computes it"
            for field, sources in stage.inputs.items()
            if None in sources
        ]
        return lines + ([f"accuracy = {stage.accuracy:g}"] if stage.accuracy is not None else [])

    def _edge(self, source: str, target: str) -> list[str]:
        share = self.probability(source, target)
        lines = ["", "[[edge]]", f"from = {quoted(source)}", f"to = {quoted(target)}"]
        if share < 1.0:
            lines += [
                f"probability = {share:.4g}",
                "# TODO: the driver's code decides it. Without `when` a hash of the query decides, so state the condition, as",
                '# when = { output = "OUTPUT", reduce = "max", op = "<", value = 0.9 }',
            ]
        return lines

    def _assigned(
        self,
        field: str,
        sources: set[str | None],
        order: list[str],
        runs: list[tuple[frozenset[str], dict[str, str | None]]],
    ) -> list[str]:
        if None in sources:
            return [f"# TODO: {key_text(field)} is computed by the driver's own code: name a tensor of a stage"]
        text = self._reference(sources, order)
        lines = [f"{key_text(field)} = {quoted(text)}"]
        ranked = text.split(" | ")
        for visited, given in runs:
            first = next((one for one in ranked if one.partition(".")[0] in visited | {QUERY}), None)
            if field in given and given[field] != first:
                return [
                    *lines,
                    f"# TODO: a run gave {given[field]}, though {first} was there: the first that was visited counts",
                ]
        return lines

    def _reference(self, sources: set[str | None], order: list[str]) -> str:
        """The alternatives, later stages first, the query's own tensors last."""
        named = [one for one in sources if one is not None]
        place = {QUERY: -1} | {name: i for i, name in enumerate(order)}
        return " | ".join(sorted(named, key=lambda one: (-place[one.partition(".")[0]], one)))

    def _order(self) -> list[str]:
        """The stages, each after those before it."""
        waits = {name: {a for a, b in self.edges if b == name} for name in self.stages}
        order: list[str] = []
        while waits:
            ready = [name for name, before in waits.items() if not before] or [next(iter(waits))]
            order += ready
            waits = {name: before.difference(ready) for name, before in waits.items() if name not in ready}
        return order


async def trace(
    client: "Client", driver: Driver, samples: "Mapping[str, Array]", *, on_run: Callable[[int], None] | None = None
) -> PipelineTrace:
    """Run a driver on each sample, and derive its graph.

    samples: arrays by name; the first axis counts samples, and a run's x has one item of each. on_run: hears how many runs have ended. A
    stage depends on another if it was asked after that one had answered, from code that may have seen the answer. Tensors are recognised
    only where the driver passes on the very array that it got. Raises BadInput for bad samples, and what the driver raises.
    """
    count = _count(samples)
    if not inspect.iscoroutinefunction(driver):
        raise BadInput("the driver must be an `async def` function of (rpc, x)")
    apps = await client.apps()
    found = PipelineTrace({app["app"]: [spec["name"] for spec in app.get("inputs") or []] for app in apps})
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count))
        each = ({name: array[i : i + 1] for name, array in samples.items()} for i in numbers)
        tasks = [asyncio.create_task(follow(client, driver, x)) for x in each]
        try:
            for one in await asyncio.gather(*tasks):
                found.add(one)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if on_run is not None:
            on_run(found.queries)
    return found


def _count(samples: "Mapping[str, Array]") -> int:
    if not samples:
        raise BadInput("samples: there must be at least one array, named like an input of the driver")
    sizes = {name: len(array) if array.ndim else -1 for name, array in samples.items()}
    if min(sizes.values()) < 0:
        raise BadInput("samples: each array must have a first axis, which counts samples")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BadInput(f"samples: all arrays must have the same number of samples, not {listed}")
    count = next(iter(sizes.values()))
    if not count:
        raise BadInput("samples: there are none; give at least one, and some hundreds for probabilities")
    return count


def _direct(call: RpcCall) -> list[RpcCall]:
    """The calls before this one that are before no other of them."""
    return [one for one in call.before if not any(one in other.before for other in call.before)]


def _named(vertex: str, x: Any) -> "list[tuple[str, Array]]":
    if isinstance(x, Mapping):
        return [(f"{vertex}.{name}", value) for name, value in x.items()]
    return [(f"{vertex}.x", x)]


def _outputs(returned: Any) -> dict[str, Any]:
    """The tensors that a driver returns, by name."""
    if isinstance(returned, Answer):
        return dict(returned.outputs)
    if isinstance(returned, Mapping):
        return {str(name): value.output if isinstance(value, Answer) else value for name, value in returned.items()}
    return {} if returned is None else {"output": returned}


def _source(value: Any, known: "list[tuple[str, Array]]") -> str | None:
    """The tensor that this is."""
    return next((name for name, array in known if _same(value, array)), None)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (hasattr(one, "__array_interface__") and hasattr(other, "__array_interface__")):
        return False
    first, second = one.__array_interface__, other.__array_interface__
    same = all(first[key] == second[key] for key in ("data", "shape", "typestr"))
    return same and first.get("strides") == second.get("strides") and one.size > 0
