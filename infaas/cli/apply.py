"""`infaas apply` and `infaas export`: a system's apps, models, targets, ensembles and pipelines as a file, and what it would change.

What a file says is made so; what it does not say stays as it is, and nothing is deleted. Keys and bounds are those of the messages.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from msgspec import UNSET, Struct, defstruct
from msgspec.structs import asdict, replace

from bus.fields import Named, Number, fields_of, hints_of
from bus.messages.catalog import AGREEMENT, AppRecord, Ensemble, Functions, ModelRecord
from bus.messages.public import Register
from bus.messages.verbs import AppSettings
from bus.subjects import WITHOUT_APP
from infaas.cli.options import DataDir, Json
from infaas.cli.output import fail, progress, show, usage
from infaas.cli.pipeline import change_of
from infaas.client import Client
from infaas.connecting import with_client
from infaas.errors import BadInput, RegistrationFailed
from infaas.folders import random_samples, repository
from infaas.registering import REMOTE
from services.core.catalog import Catalog
from services.core.toml import Location, TomlError, all_of, key_text, struct_at, value_text
from services.shell.settings import read_toml
from services.simulation.scenario.pipelines import PipelineFile
from services.simulation.scenario.planning import PipelineBlock, file_of

Item = dict[str, Any]
AROUND = ("before", "after")  # functions of a model's owner
_KEPT = ("version", "task", "metric", "inputs_key", "labels_key", "labels", "contended", "contexts", "allow_nan")
_OF_A_MODEL = (*_KEPT, "target", "unit", "columns")
_OF_A_GRAPH = {"latency_ms", "slo_target", "min_instances"}  # settings that a pipeline's own block has


class AppTable(AppSettings, frozen=True, kw_only=True):
    """An [[app]]. models: that it serves beside those that the file makes for it, with their versions. replicas: by model."""

    name: Named
    models: dict[str, Named] = {}
    replicas: dict[str, Annotated[int, Number()]] = {}
    selection: Ensemble | None = None


ModelBlock: Any = defstruct(  # a [[model]]; sha256: of its file, which then need not be there if the system has it
    "ModelBlock",
    [
        ("name", Named),
        ("app", hints_of(Register)["app"], WITHOUT_APP),
        ("file", str),
        ("validation", str, ""),
        ("sha256", str, ""),
        *((one, str, "") for one in AROUND),
        *(
            (one, str, "") if one == "metric" else (one, hints_of(Register)[one], fields_of(Register)[one].default)
            for one in _OF_A_MODEL
        ),
    ],
    frozen=True,
    kw_only=True,
)


class SystemFile(Struct, frozen=True, kw_only=True):
    """What a file says, whose paths begin at its folder."""

    app: list[AppTable] = []
    model: list[ModelBlock] = []
    pipeline: list[PipelineBlock] = []


class Change(Struct, frozen=True):
    """What is to be done. verb: the operator's; empty: a registration."""

    words: str
    verb: str
    fields: Item


def apply(
    path: Path,
    /,
    *,
    dry_run: Annotated[bool, Parameter(negative="", help="Print the plan of changes, and change nothing.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Make apps, models, targets, ensembles and pipelines as a file says. The plan of changes is printed first.

    A file that was applied already changes nothing. What it does not say stays as it is, and nothing is deleted. `infaas export` prints the
    file of a running system. A folder is a model repository of Triton, whose ONNX models become apps; NAME/validation.npz may have labelled samples. What has none is measured against
    its own answers to random items.

    Example: `infaas apply system.toml --dry-run`

    Parameters
    ----------
    path
        A TOML file with [[app]], [[model]] and [[pipeline]] blocks, or a folder.

    """
    try:
        document = _apply(path, dry_run, data_dir, progress if json else print)
    except TomlError as error:
        usage(str(error))
    show(document, json, _render)
    return 0


def _apply(path: Path, dry_run: bool, data_dir: Path | None, say: Callable[[str], None]) -> Item:
    file = _of_repository(path) if path.is_dir() else struct_at(read_toml(path), Location(str(path)), SystemFile)
    place = Location(str(path))
    folder = path if path.is_dir() else path.parent
    pipelines = all_of(
        partial(file_of, one, place.at("pipeline").at(i), folder, planning=False) for i, one in enumerate(file.pipeline)
    )

    async def run(client: "Client") -> Item:
        plan = [*_plan(file, pipelines, await catalogue(client), place, folder)]
        for one in plan:
            say(one.words)
        failed = []
        for one in [] if dry_run else plan:
            try:
                await _carry_out(client, one)
            except (BadInput, RegistrationFailed) as error:  # the other models are made
                progress(f"not made: {one.words}: {error}")
                failed.append(str(error))
        if failed:
            fail(
                f"{len(failed)} of {len(plan)} changes were not made: {failed[0]}; mend that and apply it again, the others stay"
            )
        return {"changes": [one.words for one in plan], "applied": not dry_run}

    return with_client(data_dir, run)


def _render(document: Item) -> None:
    count = len(document["changes"])
    done = "made" if document["applied"] else "to make: nothing was changed yet"
    print(
        f"{count} change{'s' * (count != 1)} {done}" if count else "nothing to change: the system is as the file says"
    )


async def catalogue(client: Client) -> Catalog:
    """The apps and models of a running system."""
    bucket, found = await client.bus.key_value(client.subjects.catalog_bucket, create=False), Catalog()
    for entry in [*await bucket.entries("app"), *await bucket.entries("model")]:
        found.apply(entry.key, entry.value)
    return found


async def _carry_out(client: Client, change: Change) -> None:
    if change.verb:
        await client.admin(change.verb, **change.fields)
        return
    fields = dict(change.fields)
    file = fields.pop("file")
    if "validation" not in fields:
        inputs = await asyncio.to_thread(random_samples, Path(file))
        x = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        fields |= {"validation": (x, None), "metric": AGREEMENT}
    status = await client.register(file, say=progress, **fields)
    for failure in status.failures:
        progress(f"not built: {failure.variant}: {failure.reason}")


# -- what would change


def _plan(
    file: SystemFile, pipelines: list[PipelineFile], there: Catalog, place: Location, folder: Path
) -> Iterator[Change]:
    for app in file.app:
        yield from _settings(app, there.app(app.name))
    new = all_of(partial(_model, one, there, place.at("model").at(i), folder) for i, one in enumerate(file.model))
    yield from filter(None, new)
    made = {one.name: one for one, change in zip(file.model, new, strict=True) if change is not None}
    for app in file.app:
        yield from _linked(app, there.app(app.name), made)
    for one in pipelines:
        record = there.app(one.name)
        now = None if record is None else (record.pipeline, record.latency_ms, one.slo_target and record.slo_target)
        if now != (one.pipeline, one.latency_ms, one.slo_target):
            words = f"{'+' if record is None else '~'} pipeline {one.name} of {', '.join(v.app for v in one.pipeline.vertices)}"
            yield Change(words, "set-pipeline", change_of(one))


def _settings(app: AppTable, record: AppRecord | None) -> Iterator[Change]:
    given = app.given
    if record is None:
        yield Change(_words("+", f"app {app.name}", given, {}), "add-app", {"app": app.name, **given})
        return
    now = {name: getattr(record, name) for name in given}
    new = {name: value for name, value in given.items() if value != now[name]}
    if new:
        yield Change(_words("~", f"app {app.name}", new, now), "set-app", {"app": app.name, **new})


def _words(mark: str, what: str, new: Item, now: Item) -> str:
    said = [
        f"{name} {value_text(value)}" + (f" (was {now[name]})" if name in now else "") for name, value in new.items()
    ]
    return f"{mark} {what}{': ' * bool(said)}{', '.join(said)}"


def _linked(app: AppTable, record: AppRecord | None, made: dict[str, Any]) -> Iterator[Change]:
    links = {} if record is None else record.links
    for model, version in app.models.items():
        if model in made and made[model].app == app.name and made[model].version in (None, version):
            continue  # its registration links it
        fields = {"app": app.name, "model": model, "version": version}
        if model not in links:
            yield Change(f"+ model {model} version {version} for app {app.name}", "link-model", fields)
        elif links[model] != version:
            yield Change(
                f"~ app {app.name} serves version {version} of {model} (was {links[model]})", "set-version", fields
            )
    for model, count in app.replicas.items():
        if record is None or record.replicas.get(model, 0) != count:
            kept: Item = {"app": app.name, "model": model, "count": count}
            yield Change(f"~ app {app.name} keeps {count} instances of {model}", "set-replicas", kept)
    if app.selection is not None and (record is None or record.selection != app.selection):
        given = asdict(app.selection)
        yield Change(
            _words("~", f"selection of app {app.name}", _said(app.selection), {}),
            "set-selection",
            {"app": app.name, **given},
        )


def _said(value: Struct) -> Item:
    """The fields that are not as by default."""
    fields = fields_of(type(value))
    return {name: one for name, one in asdict(value).items() if one not in (fields[name].default, None, UNSET)}


def _model(block: Any, there: Catalog, at: Location, folder: Path) -> Change | None:
    from infaas.samples import functions_of  # noqa: PLC0415  (numpy takes long to import)

    versions = there.versions(block.name)
    known = versions.get(block.version) if block.version is not None else None
    around = {one: _own(said, folder) for one in AROUND if (said := getattr(block, one))}
    absent = [said for said in around.values() if ".py:" in said and not Path(said.rpartition(":")[0]).is_file()]
    functions = None if block.sha256 and absent else functions_of(**around)
    source, validation = _digests(block, at, folder, functions)
    same = [
        one
        for one in ([known] if known else [] if block.version else versions.values())
        if one.source == source and validation in (None, one.validation) and _alike(functions, block, one.functions)
    ]
    if same:
        return None
    if known is not None:
        at.at("version").refuse(
            f"version {block.version} of {block.name} is another file, or has other samples or functions: give another version"
        )
    file = _path(block.file, folder)
    if validation is None and block.validation:
        at.at("file").refuse(f"there is no file {file}, and the system has no model {block.name} of this sha256")
    fields = {"file": file, "app": block.app, "model": block.name}
    if block.validation:
        fields["validation"] = folder / block.validation
    fields |= {name: getattr(block, name) for name in _OF_A_MODEL} | around
    fields["metric"] = _own(block.metric, folder)
    said = f" version {block.version}" if block.version is not None else ""
    against = "" if block.validation else ", measured against its own answers to random items"
    return Change(f"+ model {block.name}{said} for app {block.app}: {block.file}{against}", "", fields)


def _alike(functions: Functions | None, block: Any, known: Functions | None) -> bool:
    """Whether a registered model has the block's functions. functions: None: their files are not there, and their names must do."""
    if functions is not None:
        return known is not None and replace(known, model=None) == functions
    names = [known.before, known.after] if known else ["", ""]
    return names == [Path(getattr(block, one)).name for one in AROUND]


def _own(function: str, folder: Path) -> str:
    return str(folder / function) if ".py:" in function else function


def _path(file: str, folder: Path) -> str:
    return file if file.startswith(("http://", "https://")) else str(folder / file)


def _digests(block: Any, at: Location, folder: Path, functions: Functions | None) -> tuple[str, str | None]:
    """Of the model's file and of its samples, as they would be uploaded. None: not known."""
    from infaas.folders import whole_onnx  # noqa: PLC0415  (numpy takes long to import)
    from infaas.samples import validation_file  # noqa: PLC0415

    file, samples = _path(block.file, folder), folder / block.validation
    remote = file != str(folder / block.file)
    if block.sha256 and not (remote or (Path(file).is_file() and samples.exists())):
        return block.sha256, None
    for key, there in (("file", remote or Path(file).is_file()), ("validation", samples.exists())):
        if not there:
            at.at(key).refuse(f"there is no file {_path(getattr(block, key), folder)}")
    with tempfile.TemporaryDirectory(prefix="infaas-") as directory:
        content = msgspec.json.encode({"url": file}) if remote else whole_onnx(Path(file), Path(directory)).read_bytes()
        source, validation = hashlib.sha256(content).hexdigest(), None
        if block.validation:
            keys = ("metric", "inputs_key", "labels_key", "labels", "allow_nan")
            said = {name: getattr(block, name) for name in keys} | {"metric": _own(block.metric, folder)}
            request = Register(
                app=block.app, model=block.name, format="onnx", object="", validation="", functions=functions, **said
            )
            sent, _ = validation_file(Path(file), samples, request, Path(directory), None)
            validation = hashlib.sha256(sent.read_bytes()).hexdigest()
    if block.sha256 not in ("", source):
        at.at("sha256").refuse(f"{file} has another one: {source}")
    return source, validation


# -- a model repository of Triton


def _of_repository(folder: Path) -> SystemFile:
    """Its ONNX models, each for the app of its name. Other models are left out, with a word."""
    blocks = []
    for kept in repository(folder):
        if kept.left_out:
            progress(f"left out: {kept.name}: {kept.left_out}")
            continue
        samples = f"{kept.name}/validation.npz"
        blocks.append(
            ModelBlock(
                name=kept.name,
                app=kept.name,
                file=str(kept.file.relative_to(folder)),
                validation=samples if (folder / samples).is_file() else "",
                labels=kept.labels,
            )
        )
    return SystemFile(model=blocks)


# -- a running system as a file


def export(
    *,
    files: Annotated[
        Path | None, Parameter(help="A folder to write it to, as system.toml, with all the files that it names.")
    ] = None,
    data_dir: DataDir = None,
) -> int:
    """Print a running system's apps, models, targets, ensembles and pipelines as a file for `infaas apply`.

    Models are named by the sha256 of their files: applied to the same system the file changes nothing, another one takes them from beside
    it. Rules of batching, deployed plans and containers are not in it.

    Example: `infaas export --files copy`, then `infaas apply copy/system.toml`
    """
    text = with_client(data_dir, partial(_exported, folder=files))
    if files is None:
        print(text, end="")
    else:
        (files / "system.toml").write_text(text, "utf-8")
        print(f"written: {files / 'system.toml'}")
    return 0


async def _exported(client: Client, folder: Path | None) -> str:
    """The file of a system, whose models' files are put into the folder."""
    there = await catalogue(client)
    store = await client.bus.object_store(client.subjects.artifacts_bucket, create=False)
    blocks = []
    for model in sorted(there.models, key=lambda one: (one.created, one.model)):
        if model.format == "container":
            continue
        block = _file_of(model)
        kept = {block["file"]: model.source, block["validation"]: model.validation}
        if model.format == REMOTE:
            block["file"] = msgspec.json.decode(await store.get(kept.pop(block["file"])))["url"]
        blocks.append(block)
        if folder is not None:
            functions = {} if model.functions is None else model.functions.sources
            (folder / _stem(model) if functions else folder / "models").mkdir(parents=True, exist_ok=True)
            for name, digest in kept.items():
                await store.get_to(digest, folder / name)
            for name, source in functions.items():
                (folder / _stem(model) / name).write_text(source, "utf-8")
    return text_of(there, blocks)


def text_of(there: Catalog, models: list[Item]) -> str:
    """The file of a catalogue. models: their blocks."""
    lines: list[str] = []
    apps, known = sorted(there.apps, key=lambda one: (_depth(one, there), one.app)), {one["name"] for one in models}
    for app in apps:
        given = {name: getattr(app, name) for name in AppSettings.__struct_fields__}
        block = {"name": app.app, **{name: one for name, one in given.items() if one is not None}}
        if app.pipeline is not None:
            own = {name: one for name, one in _said(app).items() if name in block.keys() - _OF_A_GRAPH}
            lines += _block("app", {"name": app.app, **own}) if own else []
        else:
            links = {model: version for model, version in app.links.items() if model in known}
            more: Item = {"models": links, "replicas": app.replicas}
            if app.selection is not None:
                more["selection"] = {name: one for name, one in asdict(app.selection).items() if one is not None}
            lines += _block("app", block | {name: one for name, one in more.items() if one})
    for one in models:
        lines += _block("model", one)
    for app in apps:
        if app.pipeline is not None:
            head = {"name": app.app, "latency_ms": app.latency_ms, "slo_target": app.slo_target}
            graph = {name: one for name, one in msgspec.to_builtins(app.pipeline).items() if one}
            lines += _block("pipeline", {"pipeline": head, **graph})
    return "\n".join(lines)


def _depth(app: AppRecord | None, there: Catalog) -> int:
    """Pipelines come behind those that they are made of."""
    if app is None or app.pipeline is None:
        return 0
    return 1 + max(_depth(there.app(one.app), there) for one in app.pipeline.vertices)


def _stem(model: ModelRecord) -> str:
    return f"models/{model.model}-{model.version}"


def _file_of(model: ModelRecord) -> Item:
    stem, inputs = _stem(model), model.signature.inputs
    ending = {"onnx": ".onnx", "pt2": ".pt2", "torchscript": ".pt"}.get(model.format, "")
    found = {
        "name": model.model,
        "app": model.app,
        "file": f"{stem}{ending}",
        "validation": f"{stem}.npz",
        "sha256": model.source,
        **{name: getattr(model, name) for name in _KEPT},
        **dict(zip(("target", "unit"), model.signature.target, strict=True)),
        "columns": inputs[0].columns if len(inputs) == 1 else [],
    }
    if model.functions is not None:
        found |= {name: f"{stem}/{said}" for name in AROUND if (said := getattr(model.functions, name))}
    return {name: one for name, one in found.items() if one not in (None, "", [], False)}


def _block(head: str, fields: Item) -> list[str]:
    return [f"[[{head}]]", *(f"{key_text(name)} = {value_text(_plain(one))}" for name, one in fields.items()), ""]


def _plain(value: Any) -> Any:
    """Without what TOML cannot say: no value."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
