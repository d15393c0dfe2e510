"""`infaas payloads export` and `delete`, and `infaas remeasure`: queries that were kept with their answers, and models measured anew on them."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from infaas.cli.options import DataDir, Json
from infaas.cli.output import fail, one_line, print_variants, progress_bars, show
from infaas.cli.register import COLUMNS
from infaas.client import Client
from infaas.connecting import connect, find_sql, with_client
from infaas.errors import RegistrationFailed

if TYPE_CHECKING:
    from bus.messages.flow import Payload
    from bus.messages.public import RegistrationStatus
    from infaas.payloads import KeptItems, Label

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
    import numpy as np  # noqa: PLC0415  (it takes long to import)

    kept = asyncio.run(_kept(data_dir, app, labelled=labelled))
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
    from infaas import payloads  # noqa: PLC0415  (numpy takes long to import)

    count = with_client(data_dir, lambda client: payloads.delete(client, app, id))
    if id is not None and not count:
        fail(f"{app} has kept no query {id}: `infaas payloads export` writes those that it has")
    show({"app": app, "deleted": count}, json, lambda _: print(f"deleted {count:,} queries of {app}"))
    return 0


def remeasure(app: str, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Measure an app's models anew on its queries that were kept and have labels. Each becomes the next version, from the same file, with the new figures.

    Variants are built again, int8 ones with new scales. Live accuracy starts anew. `infaas model set-version` brings the version before back.

    Example: `infaas remeasure wine`

    Parameters
    ----------
    app
        The app. At least 100 of its kept items must have labels (`infaas feedback`).

    """
    try:
        document = asyncio.run(_remeasure(data_dir, app))
    except RegistrationFailed as failed:
        fail(str(failed))

    def render(found: dict[str, Any]) -> None:
        for one in found["models"]:
            print(f"measured {one['model']} version {one['version']} for {app} on {found['labels']:,} labels")
            print_variants(COLUMNS, "no variants", one["variants"], wide=False)

    show(document, json, render)
    return 0


async def _kept(data_dir: Path | None, app: str, *, labelled: bool) -> "KeptItems":
    async with connect(data_dir=data_dir) as client:
        return await _read(client, data_dir, app, labelled=labelled)


async def _read(client: Client, data_dir: Path | None, app: str, *, labelled: bool) -> "KeptItems":
    from infaas import payloads  # noqa: PLC0415  (numpy takes long to import)

    found = await payloads.read(client, app)
    if not found:
        await client.variants(app=app)  # there is none where no app is
        fail(
            f"{app} has kept no queries: `infaas app set {app} --payloads 0.1` keeps a tenth of those that come from now on"
        )
    labels = await asyncio.to_thread(_labels, find_sql(data_dir), app, found)
    kept = await asyncio.to_thread(payloads.arrays_of, found, labels, labelled=labelled)
    if not kept.items:
        fail(f"no query that {app} has kept has a label: send labels by `infaas feedback`, or leave --labelled out")
    return kept


def _labels(dsn: str, app: str, found: "list[Payload]") -> "dict[tuple[str, int], Label]":
    import psycopg  # noqa: PLC0415  (the command line starts without it)

    from infaas.payloads import FEEDBACK, labels_of  # noqa: PLC0415

    try:
        with psycopg.connect(dsn, connect_timeout=10, application_name="infaas payloads") as connection:
            return labels_of(connection.execute(FEEDBACK, (app, found[0].time)), found)
    except psycopg.Error as error:
        fail(f"cannot read the labels from the database: {one_line(error)}; is the system running? (infaas doctor)")


async def _remeasure(data_dir: Path | None, app: str) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415  (it takes long to import)

    from infaas.payloads import LABELS, OUTPUTS, numbered  # noqa: PLC0415
    from infaas.registering import document_of, measure_again  # noqa: PLC0415

    documents = []
    async with connect(data_dir=data_dir) as client:
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

            def on_progress(status: "RegistrationStatus") -> None:
                said = f"{status.progress:4.0%} {status.model} {status.state}: {status.step}"
                shown(status.step, status.progress, line=said, key=f"{status.model} {status.step}")

            for model in models:
                samples = {name: one for name, one in kept.arrays.items() if not name.startswith(OUTPUTS)}
                samples[LABELS] = numbered(samples[LABELS], model["labels"])
                path = Path(directory) / f"{model['model']}.npz"
                await asyncio.to_thread(np.savez, path, **samples)  # type: ignore[arg-type]  # it takes any names
                status = await measure_again(client.bus, client.subjects, model, app, path, LABELS, on_progress)
                if status.state != "done":
                    raise RegistrationFailed(status)
                documents.append(await document_of(client.variants, status))
    return {"app": app, "labels": kept.items, "models": documents}
