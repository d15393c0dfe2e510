"""`infaas payloads export` and `delete`, and `infaas remeasure`: queries that were kept with their answers, and models measured anew on them."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from cyclopts import Parameter
from msgspec import Struct, convert

from bus.codec import decode
from bus.messages.catalog import Profile, Signature
from bus.messages.flow import Payload, id_digest
from bus.messages.jobs import JobStatus
from bus.messages.public import ContainerReport, RegistrationStatus, Tensor
from bus.port import KeyValue, NotFound, together
from bus.tensors import BadTensor, to_array
from infaas.cli.options import DataDir, Json
from infaas.cli.output import fail, one_line, print_variants, progress_bars, show
from infaas.cli.register import COLUMNS
from infaas.client import Client
from infaas.connecting import find_sql, with_client
from infaas.errors import BadInput, RegistrationFailed
from infaas.following import new_id
from infaas.queries import check_name

Array = np.ndarray[Any, Any]
Label = Any  # what JSON can say
LABELS = "labels"
CONTAINER = "container"  # the format of what `infaas container` serves
OTHERS = (LABELS, "query", "item", "id", "time", "variant")  # arrays of the file beside inputs and outputs
OUTPUTS = "outputs."  # before the name of an output
TOGETHER = 200  # values that are asked for at a time
FEEDBACK = (
    "SELECT query, id, item, label FROM infaas.feedback WHERE app = %s AND time >= to_timestamp(%s) ORDER BY time"
)


class KeptItems(NamedTuple):
    """arrays: of all items, by their names in the file. left_out: items whose shapes differ from most others'."""

    arrays: dict[str, Array]
    left_out: int

    @property
    def items(self) -> int:
        return len(self.arrays["item"])


async def _bucket(client: Client) -> KeyValue:
    return await client.bus.key_value(client.subjects.payloads_bucket, create=False)


async def read_kept(client: Client, app: str) -> list[Payload]:
    """What is kept of an app, the oldest first. Raises BusError, also Forbidden: operators alone may."""
    bucket = await _bucket(client)
    keys = await bucket.keys(check_name(app, "app"))

    async def one(key: str) -> Payload | None:
        try:
            return decode(Payload, (await bucket.get(key)).value or b"")
        except NotFound:  # its time was over
            return None

    return sorted(filter(None, await together(one, keys, TOGETHER)), key=lambda payload: payload.time)


async def delete_kept(client: Client, app: str, id: str | None = None) -> int:
    """Delete what is kept of an app, or of the queries with this id, the client's own or the `query` that answers named. Returns how many there were."""
    bucket = await _bucket(client)
    keys = await bucket.keys(check_name(app, "app"))
    if id is not None:
        keys = [key for key in keys if id == key.split(".")[1] or id_digest(id) == key.split(".")[2]]
    await together(bucket.delete, keys, TOGETHER)
    return len(keys)


def labels_of(
    rows: Iterable[tuple[Any, str | None, int, str]], payloads: Sequence[Payload]
) -> dict[tuple[str, int], Label]:
    """The last label of each query's items. rows: what FEEDBACK selects."""
    by_id = {payload.id: payload.query for payload in payloads if payload.id is not None}
    found = {}
    for uid, known_as, item, label in rows:
        query = uid.hex if uid is not None else by_id.get(known_as or "")
        if query is not None:
            found[query, item] = json.loads(label)
    return found


def arrays_of(payloads: Sequence[Payload], labels: Mapping[tuple[str, int], Label], *, labelled: bool) -> KeptItems:
    """Items as arrays: inputs and `outputs.NAME` by their names, `labels`, and what they are items of. labelled: only those with a label."""
    shapes = Counter[Any]()
    groups: dict[Any, list[tuple[Payload, dict[str, Array], list[int]]]] = {}
    for payload in payloads:
        arrays = _named(payload)
        count = len(next(iter(arrays.values())))
        places = [i for i in range(count) if not labelled or (payload.query, i) in labels]
        alike = tuple((name, one.dtype.kind, one.shape[1:]) for name, one in arrays.items())
        shapes[alike] += len(places)
        groups.setdefault(alike, []).append((payload, arrays, places))
    rows = groups[max(shapes, key=lambda alike: shapes[alike])] if shapes else []
    found = (
        {name: np.concatenate([arrays[name][places] for _, arrays, places in rows]) for name in rows[0][1]}
        if rows
        else {}
    )
    items = [(payload, i) for payload, _, places in rows for i in places]
    found[LABELS] = label_array([labels.get((payload.query, i)) for payload, i in items])
    found["query"] = np.array([payload.query for payload, _ in items], dtype=np.str_)
    found["item"] = np.array([i for _, i in items], dtype=np.int64)
    found["id"] = np.array([payload.id or "" for payload, _ in items], dtype=np.str_)
    found["time"] = np.array([payload.time for payload, _ in items], dtype=np.float64)
    found["variant"] = np.array([payload.variant for payload, _ in items], dtype=np.str_)
    return KeptItems(found, shapes.total() - len(items))


def label_array(values: Sequence[Label | None]) -> Array:
    """Numbers, NaN where there is none; else texts, empty where there is none."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, int) for value in known) and len(known) == len(values):
        return np.array(values, dtype=np.int64)
    if all(isinstance(value, int | float) for value in known):
        return np.array(values, dtype=np.float64)
    sizes = {len(value) if isinstance(value, list) else 0 for value in known}
    if len(sizes) == 1 and sizes != {0} and all(isinstance(one, int | float) for value in known for one in value):
        (size,) = sizes
        return np.array([[None] * size if value is None else value for value in values], dtype=np.float64)
    return np.array(
        ["" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values],
        dtype=np.str_,
    )


def numbered(labels: Array, classes: Sequence[str]) -> Array:
    """Class numbers in place of the names of a model's classes. Raises BadInput."""
    if labels.dtype.kind != "U" or not classes:
        return labels
    place = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(labels.tolist()) - place.keys()):
        raise BadInput(f"label: the model has no class {unknown[0]!r}; its classes are {', '.join(classes)}")
    return np.array([place[one] for one in labels.tolist()], dtype=np.int64)


def _named(payload: Payload) -> dict[str, Array]:
    inputs = {name: _array(name, one) for name, one in payload.inputs.items()}
    taken = {name: "x" if len(inputs) == 1 else f"x.{name}" for name in inputs if name in OTHERS}
    found = {taken.get(name, name): one for name, one in inputs.items()}
    return found | {f"{OUTPUTS}{name}": _array(name, one) for name, one in payload.outputs.items()}


def _array(name: str, tensor: Any) -> Array:
    """Texts, or bytes that are none, without Python's objects."""
    try:
        array = to_array(tensor, name, empty=True)
        return array.astype(np.str_) if array.dtype.kind == "O" else array
    except BadTensor:
        return to_array(tensor, name, binary=True).astype(np.bytes_)


LEAST = 100  # labelled items that a model is measured anew on


def export(
    app: str,
    file: Path,
    /,
    *,
    labelled: Annotated[bool, Parameter(negative="")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Write an app's queries that were kept into an .npz file, item by item: inputs and outputs by name, and labels. Operators alone may.

    Its arrays are the inputs, `outputs.NAME`, `labels` (NaN or empty where there is none), `query`, `item`, `id`, `time` (Unix seconds) and `variant`.

    Example: `infaas payloads export wine wine.npz --labelled`

    Parameters
    ----------
    app
        The app, whose `payloads` says which share of its queries is kept (`infaas app set`).
    file
        The .npz file, which is written anew.
    labelled
        Only items whose label is known.

    """
    kept = with_client(data_dir, lambda client: _read(client, data_dir, app, labelled=labelled))
    with file.open("wb") as opened:
        np.savez_compressed(opened, **kept.arrays)  # type: ignore[arg-type]  # it takes any names
    said = {"app": app, "file": str(file), "items": kept.items, "left_out": kept.left_out}

    def render(found: dict[str, Any]) -> None:
        print(f"wrote {found['items']:,} items of {app} to {file}")
        if found["left_out"]:
            print(f"left out: {found['left_out']:,} items of other shapes than most")

    show(said, json, render)
    return 0


def delete(app: str, /, *, id: str | None = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Delete the queries of an app that were kept with their answers. Operators alone may.

    Example: `infaas payloads delete wine --id patient-7`

    Parameters
    ----------
    app
        The app.
    id
        Only queries with this id, or those whose answers named this `query`. Of pipelines' queries the stages' apps have what was kept.

    """
    count = with_client(data_dir, lambda client: delete_kept(client, app, id))
    if id is not None and not count:
        fail(f"{app} has kept no query {id}: `infaas payloads export` writes those that it has")
    show({"app": app, "deleted": count}, json, lambda _: print(f"deleted {count:,} queries of {app}"))
    return 0


def remeasure(app: str, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Measure an app's models anew on its queries that were kept and have labels. Each becomes the next version, from the same file, with the new figures.

    Variants are built again, int8 ones with new scales. Live accuracy starts anew. `infaas model set-version` brings the version before back. Classes (`infaas container`) answer the items once more, as offline work, and keep their version.

    Example: `infaas remeasure wine`

    Parameters
    ----------
    app
        The app. At least 100 of its kept items must have labels (`infaas feedback`).

    """
    try:
        document = with_client(data_dir, lambda client: _remeasure(client, data_dir, app))
    except RegistrationFailed as failed:
        fail(str(failed))

    def render(found: dict[str, Any]) -> None:
        for one in found["models"]:
            print(f"measured {one['model']} version {one['version']} for {app} on {found['labels']:,} labels")
            print_variants(COLUMNS, "no variants", one["variants"], wide=False)

    show(document, json, render)
    return 0


async def _read(client: Client, data_dir: Path | None, app: str, *, labelled: bool) -> KeptItems:
    found = await read_kept(client, app)
    if not found:
        await client.variants(app=app)  # there is none where no app is
        fail(
            f"{app} has kept no queries: `infaas app set {app} --payloads 0.1` keeps a tenth of those that come from now on"
        )
    labels = await asyncio.to_thread(_labels, find_sql(data_dir), app, found)
    kept = await asyncio.to_thread(arrays_of, found, labels, labelled=labelled)
    if not kept.items:
        fail(f"no query that {app} has kept has a label: send labels by `infaas feedback`, or leave --labelled out")
    return kept


def _labels(dsn: str, app: str, found: list[Payload]) -> dict[tuple[str, int], Label]:
    import psycopg  # noqa: PLC0415  (the command line starts without it)

    try:
        with psycopg.connect(dsn, connect_timeout=10, application_name="infaas payloads") as connection:
            return labels_of(connection.execute(FEEDBACK, (app, found[0].time)), found)
    except psycopg.Error as error:
        fail(f"cannot read the labels from the database: {one_line(error)}; is the system running? (infaas doctor)")


async def _remeasure(client: Client, data_dir: Path | None, app: str) -> dict[str, Any]:
    from infaas.registering import document_of, measure_again  # noqa: PLC0415
    from services.executor.workshop.sandbox.protocol import UploadRejected  # noqa: PLC0415

    documents = []
    kept = await _read(client, data_dir, app, labelled=True)
    if kept.items < LEAST:
        fail(
            f"{app} has {kept.items} labelled items among the queries that it has kept, and {LEAST} are needed: send labels"
            " (infaas feedback), or keep a larger share (infaas app set --payloads)"
        )
    models = [one for one in await client.models(app=app) if app in one["serving"]]
    if not models:
        fail(f"{app} is a pipeline, or serves no model: remeasure the app of a stage")
    with tempfile.TemporaryDirectory(prefix="infaas-") as directory, progress_bars() as shown:

        def on_progress(status: RegistrationStatus) -> None:
            said = f"{status.progress:4.0%} {status.model} {status.state}: {status.step}"
            shown(status.step, status.progress, line=said, key=f"{status.model} {status.step}")

        for model in models:
            samples = {name: one for name, one in kept.arrays.items() if not name.startswith(OUTPUTS)}
            samples[LABELS] = numbered(samples[LABELS], model["labels"])
            path = Path(directory) / f"{model['model']}.npz"
            await asyncio.to_thread(np.savez, path, **samples)  # type: ignore[arg-type]  # it takes any names
            report = None
            if model["format"] == CONTAINER:
                try:
                    report, path = await _answered_again(client, app, model, path, on_progress)
                except UploadRejected as error:
                    fail(f"{model['model']}: {error}")
            status = await measure_again(client.bus, client.subjects, model, app, path, LABELS, on_progress, report)
            if status.state != "done":
                raise RegistrationFailed(status)
            documents.append(await document_of(client.variants, status))
    return {"app": app, "labels": kept.items, "models": documents}


class _Given(Struct, eq=False):
    """Stands for a process whose answers are here already, in the order in which it is asked."""

    outputs: Mapping[str, Array]
    _at: int = 0

    def run(self, inputs: dict[str, Array], /) -> dict[str, Array]:
        begin, self._at = self._at, self._at + len(next(iter(inputs.values())))
        return {name: one[begin : self._at] for name, one in self.outputs.items()}


async def _answered_again(
    client: Client, app: str, model: Mapping[str, Any], samples: Path, on_progress: Callable[[RegistrationStatus], None]
) -> tuple[ContainerReport, Path]:
    """What a class of its owner's reaches on these samples, which its process answers as an offline job, and a file with their distribution. Raises InfaasError,
    UploadRejected.
    """
    import msgpack  # noqa: PLC0415

    from services.executor.workshop.sandbox.protocol import ValidationFile  # noqa: PLC0415
    from services.executor.workshop.tasks import inspection, validation  # noqa: PLC0415
    from services.executor.workshop.tasks.profiling import SeenSamples  # noqa: PLC0415

    version = convert({name: model[name] for name in ("inputs", "outputs")}, Signature)
    file = ValidationFile(
        path=str(samples), inputs_key="x", labels_key=LABELS, metric=model["metric"], allow_nan=True, most_bytes=2**30
    )
    data = await asyncio.to_thread(validation.read, file, version)
    scorer = validation.Scorer(model["metric"], version)
    scorer.check(data.labels)
    order = validation.shuffled(len(data))
    job, target = new_id(), samples.with_suffix(".msgpack")
    (variant,) = [one for one in await client.variants(app=app, model=model["model"]) if one["framework"] == CONTAINER]

    def told(status: JobStatus) -> None:
        share = status.done / (status.total or len(data))
        step = status.step or "answering once more"
        on_progress(
            RegistrationStatus(
                registration=job, state="inspecting", app=app, model=model["model"], step=step, progress=share
            )
        )

    await client.submit(app, data.take(order), target, model=model["model"], variant=variant["variant"], job=job)
    try:
        ended = await client.wait_job(job, on_progress=told)
    except asyncio.CancelledError:
        await client.cancel_job(job)
        raise
    if ended.state != "done":
        fail(f"{model['model']} has not answered the items once more: {ended.reason or ended.state}")

    def measured() -> ContainerReport:
        with target.open("rb") as written:
            answers = [convert(one, dict[str, Tensor]) for one in msgpack.Unpacker(written, raw=False)]
        outputs = {name: np.concatenate([to_array(one[name], name) for one in answers]) for name in answers[0]}
        seen = SeenSamples(version, data)
        given = inspection.predictions(_Given(outputs), data, order, scorer, TOGETHER, lambda _: None, see=seen.see)
        accuracy, sketch = scorer.judge(given, data, order), seen.packed()
        samples.write_bytes(sketch)
        return ContainerReport(
            signature=version,
            accuracy=accuracy.value,
            accuracy_low=accuracy.low,
            accuracy_high=accuracy.high,
            max_batch=1,
            profile=Profile(rows=[], load_ms=0.0, memory_mb=0.0, saturation_qps=0.0),
            distribution=sha256(sketch).hexdigest() if sketch else "",
        )

    return await asyncio.to_thread(measured), samples
