"""`infaas register`: build and measure the variants of a trained model."""

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bus import tensors
from bus.messages.catalog import in_metric
from bus.messages.public import Register
from infaas.cli.options import DataDir, Json, Wide, json_or_text, options_class, options_of
from infaas.cli.output import (
    COMPUTED,
    Column,
    fail,
    hardware_of,
    print_json,
    print_variants,
    progress,
    progress_bars,
    show,
    sure_of,
    usage,
)
from infaas.client import Client
from infaas.connecting import with_client
from infaas.errors import BadInput, InfaasError, RegistrationFailed
from infaas.folders import MLMODEL, example_of, is_mlflow, mlflow_model, signed
from infaas.inputs import read_arrays
from infaas.registering import document_of, status_document

if TYPE_CHECKING:
    from bus.messages.public import RegistrationStatus
    from infaas.registering import OnProgress


COLUMNS = (
    Column("variant", "variant"),
    Column("hardware", hardware_of, rank=2),
    Column("accuracy", sure_of),
    Column(
        "agrees", lambda item: min((item.get("agreement"), *item.get("differing", {}).values()), default=None), rank=4
    ),
    Column("load ms", "load_ms", rank=3),
    Column("compute ms", "latency_ms"),
    Column("memory MB", "memory_mb", rank=3),
    Column("saturation /s", "saturation_qps", rank=1),
    Column("US$/h", "price_per_hour", rank=5),
    Column(COMPUTED, "cost_per_1000"),
    Column("note", lambda item: "dominated" if item.get("dominated") else None),
)


MOST_TOLD = 1e6  # samples that a user is asked for


# What a registration says of the model and its app: fields of its message. Those of a user's own process as well come first.
OF_ANY = ("inputs_key", "labels_key", "task", "latency_ms", "slo_target", "accuracy")
RegisterOptions: Any = options_class(
    "RegisterOptions",
    options_of(
        Register, *OF_ANY, "version", "dry_run", "contended", "contexts", "allow_nan", "target", "unit", "release"
    ),
)
NO_OPTIONS = RegisterOptions()


def register(
    model_file: str,
    /,
    *,
    app: str,
    model: str | None = None,
    validation: Path | None = None,
    metric: str | None = None,
    default_output: str | None = None,
    labels: str | None = None,
    format: Literal["onnx", "pt2", "torchscript"] | None = None,
    before: str | None = None,
    after: str | None = None,
    stated: RegisterOptions = NO_OPTIONS,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Register a trained model: its variants are built, checked, measured and printed with their figures.

    Exits 1 if no variant works; stderr has the reason. Every variant that could not be built is named with its reason.
    Ctrl-C asks whether the work goes on in the background or is cancelled; a second one ends the command at once.

    Example: `infaas register model.onnx --app digits --model cnn --validation validation.npz`

    Parameters
    ----------
    model_file
        The model: .onnx, or .pt2 of torch.export if torch is installed. TorchScript only if the operator allows it. Or a folder of MLflow. Or the URL of a model on an
        engine that speaks the Open Inference Protocol, http://HOST:PORT/v2/models/NAME, if the operator names that host.
    app
        The app that the model serves. An app's first registration fixes the inputs and outputs of all its models.
    model
        Name of the model, unique in the cluster. Default: the app's. One app's models that answer together need names of their own.
    validation
        An .npz file with inputs (first axis: items) and their labels. Accuracy is measured on them. Without it a folder's model is measured
        against its own answers to the folder's input example.
    metric
        How outputs are scored against the labels: top1, top5, f1_macro, roc_auc, average_precision, log_loss, mae, rmse, r2, ndcg, or
        FILE.py:FUNCTION of your own, which runs in the sandbox. Default: as labels and outputs tell, top1 of classes and mae of targets.
        agreement: without labels, with the model itself.
    default_output
        What the app answers for an item if no model can answer in time, as JSON.
    labels
        Names of the classes in the order of the model's scores: a text file with one a line, or the names with commas between them. Answers
        then hold them.
    format
        Format of the model file, if its name does not tell.
    before
        Your function that makes of an item of a query what the model takes, FILE.py:FUNCTION or MODULE:FUNCTION. It runs in the sandbox.
    after
        Your function that makes the answer of what the model gives for an item, as the name of its class.

    """
    if Path(model_file).is_dir() and not is_mlflow(model_file):
        fail(f"{model_file} is a folder without {MLMODEL}: give one that MLflow has written, or a model's file")
    if validation is None and not is_mlflow(model_file):
        usage("register needs --validation: write --validation FILE.npz, `infaas register --help` lists what it takes")
    from infaas.samples import functions_of, own_metric  # noqa: PLC0415  (numpy takes long to import)

    try:
        own_metric(metric), functions_of(before, after)
    except BadInput as error:
        usage(f"--{error}")
    options: dict[str, Any] = asdict(stated) | {
        "metric": metric,
        "default_output": None if default_output is None else json_or_text(default_output),
        "labels": [] if labels is None else names_of(labels),
        "format": format,
        "before": before,
        "after": after,
        "say": progress,
    }

    under_way: list[str] = []

    async def run(client: "Client") -> dict[str, Any]:
        with progress_bars() as shown:

            def on_progress(status: "RegistrationStatus") -> None:
                under_way[:] = [status.registration]
                if status.state != "failed":  # which the error says
                    said = f"{status.progress:4.0%} {status.state}: {status.step}"
                    shown(status.step, status.progress, line=said, key=status.step)

            if is_mlflow(model_file):
                found = await _folder(client, Path(model_file), validation, app, model, on_progress, options)
            else:
                assert validation is not None, "checked above"
                status = await client.register(
                    model_file, app=app, model=model, validation=validation, on_progress=on_progress, **options
                )
                found = await document_of(client.variants, status)
        return found if stated.dry_run else found | {"unsure": await _unsure(client, app, found)}

    try:
        document = with_client(data_dir, run)
    except KeyboardInterrupt:
        if under_way:
            with_client(data_dir, lambda client: _interrupted(client, under_way[0]))
        raise
    except RegistrationFailed as failed:
        if json:
            print_json(status_document(failed.status))
        for failure in failed.status.failures:
            progress(f"{failure.variant}: {failure.reason}")
        fail(str(failed))
    show(document, json, render_dry_run if stated.dry_run else lambda found: _render(found, wide))
    return 0


async def _folder(
    client: Client,
    folder: Path,
    validation: Path | None,
    app: str,
    name: str | None,
    on_progress: "OnProgress",
    options: dict[str, Any],
) -> dict[str, Any]:
    """Register the model of MLflow's folder, on labelled samples or on the folder's input example. The document that is printed."""
    keys = options.pop("inputs_key"), options.pop("labels_key")
    del options["format"]
    if validation is not None:
        arrays = read_arrays(validation)
        if missing := [key for key in keys if key not in arrays]:
            fail(
                f"{validation} has no array {missing[0]!r}, only {', '.join(arrays)}: name it by --inputs-key or --labels-key"
            )
        x, y = (arrays[key] for key in keys)
        x = signed(folder, x)
    else:
        try:
            x, y = example_of(folder), None
        except BadInput:
            mlflow_model(folder)  # what is wrong with the model itself is told first
            raise
        progress("no labels: measured by its agreement with the model itself, on the folder's example")
    return await client.register(str(folder), x, y, app=app, name=name, on_progress=on_progress, **options)


async def _unsure(client: Client, app: str, document: dict[str, Any]) -> list[str]:
    """Of each accuracy that is asked of the app, and each variant of which the interval holds it: how many samples would tell."""
    try:
        apps, pipelines = await client.apps(app=app), await client.pipelines()
    except InfaasError:  # the model is registered all the same
        return []
    floors = {f"accuracy_mean of {one['app']}": one["accuracy_mean"] for one in apps}
    for pipeline in pipelines:
        stages = [one for one in pipeline["vertices"] if one["app"] == app]
        floors |= {f"stage {one['vertex']} of {pipeline['app']}": one["accuracy_required"] for one in stages}
    found = []
    for one in document["variants"]:
        low, high, samples = (one.get(name) for name in ("accuracy_low", "accuracy_high", "samples"))
        for asker, floor in floors.items():
            if not floor or not samples or low is None or high is None or not low < floor < high:
                continue
            end, far = high if floor > one["accuracy"] else low, abs(floor - one["accuracy"])
            most = samples * (abs(end - one["accuracy"]) / far) ** 2 if far > 0 else float("inf")
            needed = f"{most:,.0f}" if most < MOST_TOLD else "many more"
            found.append(
                f"not sure: {one['variant']} has {sure_of(one)} samples, {asker} asks for {in_metric(floor, one['metric'])}:"
                f" about {needed} samples would tell"
            )
    return found


def names_of(given: str) -> list[str]:
    """The names of `--labels`: those of a file, or the text's own."""
    if not Path(given).exists() and "," in given:
        found = [name.strip() for name in given.split(",") if name.strip()]
    else:
        found = lines_of(Path(given))
    if twice := [name for name, number in Counter(found).items() if number > 1]:
        usage(f"--labels {given}: {twice[0]!r} stands there twice; give each class a name of its own")
    return found or usage(
        f"--labels {given}: names no class; give them with commas between, or a text file with one a line"
    )


async def _interrupted(client: "Client", registration: str) -> None:
    """Ask on a terminal what becomes of a registration that is under way; else say how it can be cancelled."""
    from infaas.registering import OVER, last_status  # noqa: PLC0415  (few commands are interrupted)

    status = await last_status(client.bus, client.subjects, registration)
    if status is None or status.state in OVER:
        progress("nothing was registered" if status is None else f"registration {registration} is {status.state}")
        return
    later = f"`infaas registrations` shows it, `infaas cancel {registration}` cancels it"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        progress(f"registration {registration} goes on in the background: {later}")
        return
    print(
        f"\nregistration {registration}: press Enter to let it go on, or c and Enter to cancel it: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("c", "cancel"):
        progress(f"it goes on in the background: {later}")
        return
    await client.cancel_registration(registration)
    progress(f"cancelled registration {registration}")


def lines_of(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        usage(f"--labels {path}: cannot be read ({error}); name a text file, or the classes with commas between them")


def _render(document: dict[str, Any], wide: bool) -> None:
    print(f"registered {document['model']} version {document['version']} for app {document['app']}")
    print_variants(COLUMNS, "no variants", document["variants"], wide)
    for failure in document["failures"]:
        print(f"not built: {failure['variant']}: {failure['reason']}")
    for said in document["unsure"]:
        print(said)


def render_dry_run(document: dict[str, Any]) -> None:
    """What would be registered, for people."""
    version = f"version {document['version']}" if document["version"] else "as the next version"
    print(f"would register {document['model']} {version} for app {document['app']}; nothing was kept")
    for what in ("inputs", "outputs"):
        print(f"{what}: {', '.join(_words(spec) for spec in document[what])}")
    metric = document.get("metric") or "top1"
    name, _, value = in_metric(document["accuracy"], metric).partition(" ")
    print(f"{name}: {value} on the validation set of {document['samples']}")
    if "variants" in document:
        print(f"variants: {', '.join(each['variant'] for each in document['variants'])}")
    else:
        figures = ", ".join(f"{batch}: {ms:.3g}" for batch, ms in document["latency_ms"].items())
        print(f"latency by batch, ms: {figures}")


def _words(spec: dict[str, Any]) -> str:
    return f"{spec['name']} {spec['datatype']}{tensors.shown(spec['shape'], 'n')}"
