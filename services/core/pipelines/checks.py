"""What is wrong with a pipeline: each text names the field and the remedy. Pure."""

from collections.abc import Iterable, Mapping
from math import isfinite, prod

from msgspec.structs import replace

from bus.datatypes import SIZES
from bus.messages.catalog import (
    AppRecord,
    EdgeCondition,
    PipelineEdge,
    PipelineRecord,
    PipelineVertex,
    Signature,
    TensorSpec,
)
from bus.subjects import valid_name
from services.core.pipelines.branching import OPERATORS, REDUCTIONS, SMALL, oversized
from services.core.pipelines.graph import (
    QUERY,
    BadReference,
    CyclicPipeline,
    PipelineGraph,
    Reference,
    references,
)
from services.core.pipelines.items import edge_errors, fan_of, item_of, row_errors
from services.core.validation import fits

Apps = Mapping[str, AppRecord]

MOST_VERTICES = 64
MOST_EDGES = 256
MOST_STAGES = 512  # with those of pipelines within it
MOST_DEEP = 8  # pipelines within pipelines
_NAME_RULE = "1 to 64 of A-Z a-z 0-9 _ and -, the first a letter or digit"


def pipeline_errors(
    name: str, latency_ms: float | None, record: PipelineRecord, apps: Apps | None, hop_ms: float = 0.0
) -> list[str]:
    """All that is wrong; empty: nothing is.

    apps: that exist, by name; None: not known, so that only what the pipeline itself says is checked. hop_ms: the time that a message
    between two stages takes.
    """
    wrong = _names(name, record)
    if wrong:
        return wrong
    try:
        graph = PipelineGraph(record)
    except CyclicPipeline as error:
        edge = f"edge[{error.cycle[-2]} -> {error.cycle[-1]}]"
        return [f"{edge}: {error}; leave this edge or another of them out: a query visits each vertex once"]
    wrong += _values(record)
    wrong += edge_errors(graph, record)
    wrong += _reached(graph, record)
    wrong += _objective(latency_ms, graph, hop_ms)
    wrong += _contained(name, record, apps or {})
    if wrong or apps is None:
        return wrong
    wrong = _apps(record, apps)
    return wrong or [*_tensors(graph, record, apps), *_conditions(graph, apps)] or [*row_errors(graph, record, apps)]


def signature_of(record: PipelineRecord, apps: Apps) -> Signature:
    """The inputs and outputs of a pipeline without errors, as its app has them."""
    inputs: dict[str, TensorSpec] = {}
    by_name = {vertex.name: vertex for vertex in record.vertices}
    for vertex in record.vertices:
        for field, text in vertex.inputs.items():
            for tensor in _queries(text):
                spec = _input(apps, vertex, field)
                inputs.setdefault(tensor, replace(spec, name=tensor))
    outputs = []
    for field, text in record.output.items():
        given = _given(apps, by_name, references(text)[0], inputs)
        assert given is not None, "it was checked before"
        outputs.append(replace(given, name=field))
    return Signature(inputs=list(inputs.values()), outputs=outputs)


# -- names and structure


def _names(name: str, record: PipelineRecord) -> list[str]:
    wrong = []
    if not valid_name(name):
        wrong.append(f"name: must be {_NAME_RULE}")
    for field, count, most in (
        ("vertex", len(record.vertices), MOST_VERTICES),
        ("edge", len(record.edges), MOST_EDGES),
    ):
        if count > most:
            wrong.append(f"{field}: at most {most}, not {count}; make a pipeline of a part of it")
    if not record.vertices:
        wrong.append("vertex: must name at least one stage: [[vertex]] with name, app and inputs")
    known: set[str] = set()
    for i, vertex in enumerate(record.vertices):
        if not valid_name(vertex.name):
            wrong.append(f"vertex[{i}].name: must be {_NAME_RULE}")
        if vertex.name in known:
            wrong.append(f"vertex[{i}].name: {vertex.name!r} is there twice; give each stage a name of its own")
        known.add(vertex.name)
    pairs: set[tuple[str, str]] = set()
    for i, edge in enumerate(record.edges):
        for field, end in (("from", edge.source), ("to", edge.target)):
            if end not in known:
                wrong.append(
                    f"edge[{i}].{field}: there is no vertex {end[:80]!r}; there are: {', '.join(sorted(known))}"
                )
        if (edge.source, edge.target) in pairs:
            wrong.append(f"edge[{i}]: {edge.source} -> {edge.target} is there twice; leave one out")
        pairs.add((edge.source, edge.target))
    return wrong


def _values(record: PipelineRecord) -> list[str]:
    wrong = []
    for vertex in record.vertices:
        accuracy = vertex.accuracy
        if accuracy is not None and not 0 <= accuracy <= 1:
            wrong.append(f"vertex[{vertex.name}].accuracy: must be from 0 to 1, not {accuracy:g}")
    for edge in record.edges:
        share = edge.probability
        if share is not None and not 0 < share <= 1:
            wrong.append(
                f"{_at(edge)}.probability: must be above 0 and at most 1, not {share:g}; it is the share of the queries"
                f" that visit {edge.source} and go on to {edge.target}"
            )
        if edge.when is not None:
            wrong += _condition(f"{_at(edge)}.when", edge.when)
    for vertex in record.vertices:
        pair = oversized([edge for edge in record.edges if edge.source == vertex.name])
        if pair is not None:
            wrong.append(
                f"{_at(pair[1])}.probability: {_at(pair[0])} never holds together with it, but both add up to more than 1"
            )
    return wrong


def _condition(at: str, when: EdgeCondition) -> list[str]:
    wrong = []
    if when.reduce not in REDUCTIONS:
        wrong.append(f"{at}.reduce: must be one of {', '.join(REDUCTIONS)}, not {when.reduce[:80]!r}")
    if when.op not in OPERATORS:
        wrong.append(f"{at}.op: must be one of {' '.join(OPERATORS)}, not {when.op[:80]!r}")
        return wrong
    values = when.value if when.op == "in" else [when.value]
    if not isinstance(values, list) or not values:
        return [*wrong, f"{at}.value: must be a list with at least one value, since op is in"]
    if not all(isinstance(value, (int, float, str)) for value in values):
        wrong.append(f"{at}.value: must be a number or a text")
    elif any(isinstance(value, float) and not isfinite(value) for value in values):
        wrong.append(f"{at}.value: must be finite")
    elif when.op in ("<", ">") and isinstance(when.value, str):
        wrong.append(f"{at}.value: must be a number, since op is {when.op}")
    elif when.reduce in ("max", "argmax") and any(isinstance(value, str) for value in values):
        wrong.append(f"{at}.value: must be a number, since reduce is {when.reduce}; texts are compared with first")
    return wrong


def _reached(graph: PipelineGraph, record: PipelineRecord) -> list[str]:
    """Errors of vertices that no query visits, or that nothing is done with, and of references to what is not there yet."""
    wrong = []
    used: set[str] = set()
    for field, text in record.output.items():
        try:
            named = {ref.vertex for ref in references(text)}
        except BadReference as error:
            wrong.append(f"output.{field}: {error}")
            continue
        used |= named
        unknown = sorted(named - graph.vertices.keys() - {QUERY})
        wrong += [f"output.{field}: there is no vertex {one!r}; there are: {', '.join(graph.order)}" for one in unknown]
        if not unknown and QUERY not in named and not graph.certain(named):
            wrong.append(
                f"output.{field}: some queries visit none of {', '.join(sorted(named))};"
                f" add a vertex that each query visits, or what the query gave: {text} | $.NAME"
            )
    if not record.output:
        wrong.append('output: must name at least one tensor of the answer: [output] with NAME = "VERTEX.OUTPUT"')
    for name, vertex in graph.vertices.items():
        wrong += _inputs(graph, vertex)
        if not wrong and name in graph.sinks and name not in used:
            wrong.append(
                f"vertex[{name}]: nothing is done with its answer; name it in [output], add an edge from it, or leave it out"
            )
    return wrong


def _inputs(graph: PipelineGraph, vertex: PipelineVertex) -> list[str]:
    """Errors of where a vertex has its inputs from."""
    wrong = []
    before = graph.ancestors(vertex.name)
    needs: set[str] = set()
    for field, text in vertex.inputs.items():
        at = f"vertex[{vertex.name}].inputs.{field}"
        try:
            named = {ref.vertex for ref in references(text)} - {QUERY}
        except BadReference as error:
            wrong.append(f"{at}: {error}")
            continue
        unknown = sorted(named - graph.vertices.keys())
        if unknown:
            wrong.append(f"{at}: there is no vertex {unknown[0]!r}; there are: {', '.join(graph.order)}")
            continue
        needs |= named - before
        if (
            named <= before
            and QUERY not in {ref.vertex for ref in references(text)}
            and not graph.certain(named, vertex.name)
        ):
            wrong.append(
                f"{at}: some queries that visit {vertex.name} visit none of {', '.join(sorted(named))};"
                f" add an alternative: {text} | $.NAME"
            )
    if needs and not graph.into[vertex.name]:
        wrong.append(
            f"vertex[{vertex.name}]: no edge reaches it, but it needs {', '.join(sorted(needs))}: add [[edge]] with"
            f' from = "{min(needs)}" and to = "{vertex.name}"'
        )
    elif needs:
        wrong.append(
            f"vertex[{vertex.name}].inputs: no path of edges leads from {', '.join(sorted(needs))} to it, so they may answer later;"
            " add an edge"
        )
    return wrong


def _objective(latency_ms: float | None, graph: PipelineGraph, hop_ms: float) -> list[str]:
    if latency_ms is None:
        return []
    if not (isfinite(latency_ms) and latency_ms > 0):
        return ["latency_ms: must be a number above 0"]
    hops, path = graph.longest_path(dict.fromkeys(graph.order, 1.0))
    least = (hops + 1) * hop_ms
    if latency_ms <= least:
        text = (
            f"latency_ms: must be above {least:g} ms, not {latency_ms:g}: so long do the {hops + 1:.0f} messages take"
        )
        return [f"{text} on the path {' -> '.join(path)}"]
    return []


def _contained(name: str, record: PipelineRecord, apps: Apps) -> list[str]:
    """Errors of vertices whose app is, or asks, the pipeline itself; of pipelines within pipelines that are too many together."""
    wrong = []
    for vertex in record.vertices:
        chain = _chain(name, vertex.app, apps, [vertex.app], set())
        if chain is not None:
            asked = "" if len(chain) == 1 else f" by way of {' -> '.join(chain)}"
            wrong.append(f"vertex[{vertex.name}].app: the pipeline contains itself{asked}; name another app")
    if not wrong:
        stages, deep = _extent(record, apps, {name: (0, 0)})
        if stages > MOST_STAGES:
            wrong.append(f"vertex: with those of pipelines within it, there are more than {MOST_STAGES}; name fewer")
        if deep > MOST_DEEP:
            wrong.append(f"vertex: pipelines within pipelines, more than {MOST_DEEP} deep; name apps that are none")
    return wrong


def _chain(name: str, app: str, apps: Apps, path: list[str], seen: set[str]) -> list[str] | None:
    """The apps by which `app` asks `name`; None: it does not. seen: apps that do not."""
    if app == name:
        return path
    seen.add(app)
    record = apps[app].pipeline if app in apps else None
    for vertex in record.vertices if record is not None else ():
        if vertex.app not in seen and len(path) <= MOST_DEEP:
            found = _chain(name, vertex.app, apps, [*path, vertex.app], seen)
            if found is not None:
                return found
    return None


def _extent(record: PipelineRecord, apps: Apps, known: dict[str, tuple[int, int]], deep: int = 0) -> tuple[int, int]:
    """Its stages with those of pipelines within it, and how deep these are. known: of apps that were looked at."""
    if deep > MOST_DEEP:
        return 0, 1
    stages, deepest = 0, 0
    for vertex in record.vertices:
        inner = apps[vertex.app].pipeline if vertex.app in apps else None
        if inner is None:
            stages += 1
            continue
        if vertex.app not in known:
            known[vertex.app] = _extent(inner, apps, known, deep + 1)
        within = known[vertex.app]
        stages += within[0]
        deepest = max(deepest, within[1])
    return stages, deepest + 1


# -- apps and signatures


def _apps(record: PipelineRecord, apps: Apps) -> list[str]:
    wrong = []
    for vertex in record.vertices:
        app = apps.get(vertex.app)
        at = f"vertex[{vertex.name}]"
        if app is None:
            wrong.append(f"{at}.app: there is no app {vertex.app[:80]!r}; register a model for it, or see infaas apps")
        elif app.signature is None:
            wrong.append(f"{at}.app: {vertex.app} has no model yet; register one")
        else:
            names = [spec.name for spec in app.signature.inputs]
            takes = f"{vertex.app} takes {', '.join(names)}"
            wrong += [f"{at}.inputs: lacks {one}: {takes}" for one in names if one not in vertex.inputs]
            wrong += [f"{at}.inputs.{one}: is unknown: {takes}" for one in vertex.inputs if one not in names]
    return wrong


def _tensors(graph: PipelineGraph, record: PipelineRecord, apps: Apps) -> list[str]:
    """Errors of tensors that do not fit where they go."""
    wrong: list[str] = []
    asked: dict[str, TensorSpec] = {}  # inputs of the pipeline, as their first user takes them
    for vertex in record.vertices:
        for field, text in vertex.inputs.items():
            spec = _input(apps, vertex, field)
            for ref in references(text):
                at = f"vertex[{vertex.name}].inputs.{field}"
                if ref.vertex == QUERY:
                    given = asked.setdefault(ref.tensor, spec)
                    if not (fits(given, spec) and fits(spec, given)):
                        wrong.append(f"{at}: {ref} is {_shown(given)} elsewhere, but {spec.name} is {_shown(spec)}")
                else:
                    wrong += _fitting(at, graph, apps, ref, vertex.name, spec)
    for field, text in record.output.items():
        wrong += _output(f"output.{field}", references(text), graph, apps, asked)
    return wrong or _stood_for(graph, record, apps)


def _stood_for(graph: PipelineGraph, record: PipelineRecord, apps: Apps) -> list[str]:
    """Errors of what takes only the answer of an optional stage, for which nothing stands."""
    wrong = []
    texts = [(f"output.{field}", text) for field, text in record.output.items()]
    for vertex in record.vertices:
        fan = fan_of(graph, vertex.name)  # what has no answer has no items
        inputs = {} if fan is not None and graph.vertices[fan.source].optional else vertex.inputs
        texts += [(f"vertex[{vertex.name}].inputs.{field}", text) for field, text in inputs.items()]
    for at, text in texts:
        stages = [graph.vertices.get(ref.vertex) for ref in references(text)]
        if all(one is not None and one.optional and apps[one.app].default_output is None for one in stages):
            one = next(one for one in stages if one is not None)
            wrong.append(
                f"{at}: {one.name} is optional: name what stands for it, as {text} | $.NAME, or give the app {one.app} a default output"
            )
    return wrong


def _fitting(at: str, graph: PipelineGraph, apps: Apps, ref: Reference, name: str, spec: TensorSpec) -> list[str]:
    given = _given(apps, graph.vertices, ref, {})
    if given is None:
        return [f"{at}: {_lacking(graph, apps, ref)}"]
    fan = fan_of(graph, name)
    if fan is not None and fan.source == ref.vertex:
        given = item_of(given, spec) or given
    if not fits(given, spec):
        return [
            f"{at}: {ref} is {_shown(given)}, but {spec.name} must be {_shown(spec)}; put an app between that converts it"
        ]
    return []


def _output(
    at: str, refs: list[Reference], graph: PipelineGraph, apps: Apps, asked: Mapping[str, TensorSpec]
) -> list[str]:
    wrong = []
    found: list[tuple[Reference, TensorSpec]] = []
    for ref in refs:
        spec = _given(apps, graph.vertices, ref, asked)
        if spec is not None:
            found.append((ref, spec))
        elif ref.vertex == QUERY:
            wrong.append(
                f"{at}: no vertex takes {ref}; name one of {', '.join(f'$.{one}' for one in asked) or 'no input'}"
            )
        else:
            wrong.append(f"{at}: {_lacking(graph, apps, ref)}")
    for other, second in found[1:]:
        one, first = found[0]  # the answer is announced as this one is
        if first.datatype != second.datatype or not _within(second.shape, first.shape):
            wrong.append(f"{at}: {one} is {_shown(first)}, but {other} is {_shown(second)}; alternatives must be alike")
    return wrong


def _within(shape: list[int], announced: list[int]) -> bool:
    return len(shape) == len(announced) and all(wide in (-1, n) for n, wide in zip(shape, announced, strict=True))


def _conditions(graph: PipelineGraph, apps: Apps) -> list[str]:
    wrong = []
    for edges in graph.out.values():
        for edge in edges:
            if edge.when is None:
                continue
            ref = Reference(edge.source, edge.when.output)
            spec = _given(apps, graph.vertices, ref, {})
            if spec is None:
                wrong.append(f"{_at(edge)}.when.output: {_lacking(graph, apps, ref)}")
            elif spec.datatype == "BYTES" and edge.when.reduce != "first":
                wrong.append(f"{_at(edge)}.when.reduce: {ref} holds texts; use first")
            elif (spec.datatype == "BYTES") != all(isinstance(value, str) for value in _compared(edge.when)):
                kind = "texts" if spec.datatype == "BYTES" else "numbers"
                wrong.append(f"{_at(edge)}.when.value: {ref} holds {kind}; compare with {kind}")
            elif (size := abs(prod(spec.shape)) * SIZES[spec.datatype]) > SMALL:
                wrong.append(
                    f"{_at(edge)}.when.output: {ref} takes {size:,} bytes, and conditions read at most {SMALL:,};"
                    " decide by a smaller output"
                )
    return wrong


def _compared(when: EdgeCondition) -> Iterable[object]:
    return when.value if isinstance(when.value, list) else [when.value]


def _given(
    apps: Apps, vertices: Mapping[str, PipelineVertex], ref: Reference, asked: Mapping[str, TensorSpec]
) -> TensorSpec | None:
    """What a reference stands for; None if it is not there."""
    if ref.vertex == QUERY:
        return asked.get(ref.tensor)
    return next((spec for spec in _signature(apps, vertices[ref.vertex]).outputs if spec.name == ref.tensor), None)


def _input(apps: Apps, vertex: PipelineVertex, field: str) -> TensorSpec:
    return next(spec for spec in _signature(apps, vertex).inputs if spec.name == field)


def _signature(apps: Apps, vertex: PipelineVertex) -> Signature:
    signature = apps[vertex.app].signature
    assert signature is not None, "it was checked before"
    return signature


def _queries(text: str) -> list[str]:
    return [ref.tensor for ref in references(text) if ref.vertex == QUERY]


def _lacking(graph: PipelineGraph, apps: Apps, ref: Reference) -> str:
    vertex = graph.vertices[ref.vertex]
    names = ", ".join(spec.name for spec in _signature(apps, vertex).outputs)
    return f"{vertex.app} has no output {ref.tensor!r}; it has {names}"


def _shown(spec: TensorSpec) -> str:
    return f"{spec.datatype}{spec.shape}"


def _at(edge: PipelineEdge) -> str:
    return f"edge[{edge.source} -> {edge.target}]"
