"""`infaas query` and `infaas explain`: one query, or the decision that it would get."""

import contextlib
import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.answers import why_chosen
from infaas.cli.options import NO_NEEDS, DataDir, Json, NeedOptions, Wide
from infaas.cli.output import (
    COMPUTED,
    Column,
    fail,
    number,
    print_functions,
    print_json,
    print_table,
    progress_bars,
    refusal_line,
    show,
    sure_of,
    usage,
)
from infaas.connecting import with_client
from infaas.errors import BadInput, Refused
from infaas.inputs import STDIN, read_input, read_json

if TYPE_CHECKING:
    from bus.tensors import Array
    from infaas.answers import Answer
    from infaas.client import Client


_MAX_ITEMS = 20  # items of an output that are printed
_TOGETHER = 500  # labels between two words of progress
_MOST_TOLD = 5  # refused labels that are told


def query(
    app: str | None = None,
    *,
    input: Path | None = None,
    input_key: str | None = None,
    json_input: str | None = None,
    needs: NeedOptions = NO_NEEDS,
    id: str | None = None,
    timeout: Annotated[
        float | None, Parameter(validator=Number(gt=0), help="Longest wait in seconds. Default: 30.")
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Send one query and print its answer: outputs, the variant that answered, latency, cost, and missed requirements.

    Exits 1 if the query is refused. Then stderr has the reason, the closest variant and the time after which to try again.

    Example: `infaas query digits --input pictures.npy --accuracy 0.97`

    Parameters
    ----------
    app
        The app to query. Without it, name a registered `--model`.
    input
        A .npy file, an .npz file with one array or with one for each input of the model, a .csv file whose first line names the columns, a .json or .jsonl file of rows, or
        a picture. `-` reads a .npy or .npz file, or JSON, from standard input.
    input_key
        The array of the .npz file to send.
    json_input
        The inputs as JSON: a nested list whose first axis counts items, or a map of input names to such lists.
    id
        Any text; the answer returns it.

    """
    if (input is None) == (json_input is None):
        usage("give the inputs with either --input FILE or --json-input JSON")
    if input_key is not None and input is None:
        usage("--input-key: names an array of a file: give the file with --input")
    if app is None and needs.model is None:
        usage("name an app, as in infaas query APP, or a registered model (--model)")
    x = read_json(json_input) if json_input is not None else read_input(input or STDIN, key=input_key)
    wanted = needs.to_needs()
    wanted["id"] = id
    answer = with_client(data_dir, lambda client: client.query(app, x, timeout=timeout, raise_refused=False, **wanted))
    if isinstance(answer, Refused):
        if json:
            print_json(answer.to_map())
        fail(refusal_line(answer))
    if json:
        print_json(answer.to_map())
    else:
        _render(answer)
    return 0


def feedback(app: str, file: Path, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Report the true labels of earlier queries of an app. Each counts once, however often the file is sent.

    Exits 1 if some are refused. Then stderr has the lines and the reasons.

    Example: `infaas feedback wine labels.csv`

    Parameters
    ----------
    file
        A CSV file. Its first line names the columns: `label` (a class' name or number, or a value), and `query` (that an answer named) or
        `id` (the query's own); `item`, `context`.

    """
    items = read_labels(file)
    refused: dict[int, Refused] = {}

    async def send(client: "Client") -> None:
        with progress_bars() as shown:
            for first in range(0, len(items), _TOGETHER):
                found = await client.feedbacks(app, items[first : first + _TOGETHER])
                refused.update({first + place: why for place, why in found.items()})
                done = min(first + _TOGETHER, len(items))
                shown(f"{done:,} labels of {len(items):,}", done, len(items))

    with_client(data_dir, send)
    said = {"labels": len(items), "accepted": len(items) - len(refused)}
    more = [{"line": place + 2, "error": str(why)} for place, why in sorted(refused.items())]
    show(
        {**said, "refused": more},
        json,
        lambda found: print(f"{found['accepted']:,} labels of {found['labels']:,} accepted"),
    )
    if refused:
        some = "; ".join(f"line {one['line']}: {one['error']}" for one in more[:_MOST_TOLD])
        fail(
            f"{len(refused):,} of {len(items):,} labels were refused: {some}{'; ...' if len(more) > _MOST_TOLD else ''}"
        )
    return 0


def read_labels(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of labels, as `Client.feedbacks` takes them. Raises BadInput with the line."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            rows = list(csv.DictReader(opened, restkey="", strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = getattr(error, "strerror", None) or error
        raise BadInput(f"{file}: cannot be read as CSV: {said}") from None
    columns = set(rows[0]) if rows else set()
    if "label" not in columns or not columns & {"query", "id"}:
        raise BadInput(f"{file}: the first line must name the columns label, and query or id, and labels must follow")
    if unknown := sorted(columns - {"label", "query", "id", "item", "context"}):
        raise BadInput(f"{file}: column {unknown[0]!r} is none of label, query, id, item and context: leave it out")
    return [_labelled(row, f"{file}, line {number}") for number, row in enumerate(rows, 2)]


def _labelled(row: dict[str, str | None], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: value for name, value in row.items() if value}
    if "label" not in found or not found.keys() & {"query", "id"}:
        raise BadInput(f"{place}: give a label, and the query or id that it is for")
    if "item" in found:
        if not found["item"].isdecimal():
            raise BadInput(f"{place}: item must be the number of an item, from 0, not {found['item']!r}")
        found["item"] = int(found["item"])
    with contextlib.suppress(ValueError):
        value = float(found["label"])
        if math.isfinite(value):
            found["label"] = int(value) if found["label"].lstrip("+-").isdecimal() else value
    return found


def _render(answer: "Answer") -> None:
    for name, array in answer.outputs.items():
        unit = f" {answer.unit}" if answer.unit else ""
        print(f"{answer.target or name:10} {_describe(array, answer.labels)}{unit}")
    if answer.default:
        print(f"default    the app's default output, after {number(answer.latency_ms)} ms")
        print(f"reason     {answer.reason}")
        print(f"missed     {', '.join(answer.missed) or 'nothing'}")
        return
    simulated = ", simulated" if answer.simulated else ""
    if answer.variant:
        print(f"variant    {answer.variant} (model {answer.model}, version {answer.version})")
        print(f"ran on     {answer.hardware}, worker {answer.worker}, in a batch of {answer.batch}{simulated}")
    if answer.members is not None:
        missing = f" ({answer.missing} missing)" if answer.missing else ""
        print(f"members    {', '.join(answer.members)}{missing}")
    if answer.confidence is not None:
        each = f" ({', '.join(map(number, answer.confidences[:_MAX_ITEMS]))})" if answer.confidences else ""
        print(f"confidence {number(answer.confidence)}{each}")
    if answer.quality:
        metric, _, value = answer.quality.partition(" ")
        print(f"{metric:10} {value} (measured when it was registered)")
    print(
        f"latency    {number(answer.latency_ms)} ms"
        f" (queue {number(answer.queue_ms)}, compute {number(answer.compute_ms)}){' from the cache' * answer.cached}"
    )
    print(f"charged    US$ {number(answer.cost)}")
    print(f"missed     {', '.join(answer.missed) or 'nothing'}")
    if answer.reason is not None:
        print(f"reason     {answer.reason}")
    if answer.query is not None:
        print(f"query      {answer.query}")


def _describe(array: "Array", labels: list[str] | None = None) -> str:
    """The top class of each item if the output holds one score for each class, else the values themselves. labels: names of the classes."""
    more = f" … ({len(array)} items)" if len(array) > _MAX_ITEMS else ""
    if array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind == "f":
        tops = array[:_MAX_ITEMS].argmax(1)
        scores = array[range(len(tops)), tops]
        names = labels[:_MAX_ITEMS] if labels else tops.tolist()
        classes = ", ".join(f"{name} ({score:.3g})" for name, score in zip(names, scores.tolist(), strict=True))
        return f"class {classes}{more}"
    if array.size <= 200:
        return " ".join(str(array.tolist()).split())
    if array.ndim == 1:
        return f"{array[:_MAX_ITEMS].tolist()}{more}"
    return f"{array.dtype} of shape {list(array.shape)} (--json prints all of it)"


_EXPLAIN_COLUMNS = (
    Column("", lambda item: " " if item.get("why_not") else "->"),
    Column("variant", "variant"),
    Column("state", "state"),
    Column(
        "on",
        lambda item: f"{item.get('worker') or item.get('hardware')}{' (simulated)' * bool(item.get('simulated'))}",
        rank=3,
    ),
    Column("accuracy", sure_of),
    Column("latency ms", "latency_ms"),
    Column("load ms", "load_ms", rank=2),
    Column(COMPUTED, "cost_per_1000", rank=1),
    Column(
        "why, or why not",
        lambda item: item.get("why_not") or f"chosen: {item.get('why') or 'meets all needs'}",
        flows=True,
    ),
)


_STAGE_COLUMNS = (
    Column("stage", "vertex"),
    Column("app", "app"),
    Column("share ms", "share_ms", rank=1),
    Column("accuracy", lambda item: None if item["accuracy"] is None else f">= {item['accuracy']:g}"),
    Column("visited if", lambda item: " or ".join(item["when"]) or "always", rank=3),
    Column("variant", "variant"),
    Column("waiting", "waiting", rank=4),
    Column("why", "why", flows=True),
)

_MEMBER_COLUMNS = (
    Column("member", "member"),
    Column("probability", "probability"),
    Column("weight", "weight", rank=1),
    Column("variant", "variant"),
    Column("why", "why", flows=True),
)


def explain(
    app: str, *, needs: NeedOptions = NO_NEEDS, data_dir: DataDir = None, wide: Wide = False, json: Json = False
) -> int:
    """Show which variant would answer a query with these requirements now, and why each other variant would not.

    Sends no query and changes nothing. Where several models answer together: which of them would be asked, and why. Of a pipeline: the same of
    each of its stages, with its share of the latency objective.

    Example: `infaas explain digits --accuracy 0.97 --latency-ms 20`

    Parameters
    ----------
    app
        The app that would be queried.

    """
    document = with_client(data_dir, lambda client: client.explain(app, **needs.to_needs()))
    show(document, json, lambda found: _render_explain(found, wide=wide))
    return 0


def _render_explain(explanation: dict[str, Any], *, wide: bool) -> None:
    why = why_chosen(explanation)
    if members := explanation.get("members"):
        print_table(members, _MEMBER_COLUMNS, "", wide=wide)
        print()
    stages = explanation.get("stages")
    if stages:
        print_table(stages, _STAGE_COLUMNS, "", wide=wide)
        print()
    rows = [{**each, "why": why} for each in explanation.get("candidates") or []]
    columns = (Column("stage", "stage"), *_EXPLAIN_COLUMNS) if stages else _EXPLAIN_COLUMNS
    empty = "this app has no variants" if stages is None else "no variants were considered"
    print_table(rows, columns, empty, wide=wide)
    print_functions(rows)
    if explanation.get("chosen") is None:
        refusal = explanation.get("refusal")
        print(
            f"no variant: {refusal_line(Refused.from_map({'error': refusal}))}"
            if refusal
            else "no variant would answer now"
        )
