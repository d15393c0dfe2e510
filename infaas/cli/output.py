"""Output of every command: failures as one line, results as JSON, tables and text, progress on stderr."""

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from msgspec import Struct

from bus.messages.catalog import is_error, value_of
from infaas.errors import Refused

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

FAILED = 1  # the request failed
DAY_S = 86_400.0
USAGE = 2  # the command was used wrongly


class Failure(Exception):
    """Ends a command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def render_done(document: Mapping[str, Any]) -> None:
    """That an operator's verb was carried out, and what else became of it."""
    print("done", *filter(None, [document.get("note")]), sep=": ")


def found_words(found: Mapping[str, Any]) -> str:
    """What labels or references say, with half of its interval: "0.447 ± 0.05 (994 labels)"."""
    half, by = (found["high"] - found["low"]) / 2, "reference" if found.get("source") == "reference" else "label"
    return f"{found['accuracy']:.3f} ± {half:.2g} ({found['labels']:,} {by}{'s' * (found['labels'] != 1)})"


def context_words(item: Mapping[str, Any]) -> str | None:
    """What the labels of a context say of a member: of its variant that has most of them."""
    live = max((item.get("live") or {}).values(), key=lambda one: one["labels"], default=None)
    return live and found_words(live)


def missed_words(app: Mapping[str, Any]) -> str:
    """What an app's answers should reach and do not, by their labels, or one of its variants by references; empty: they do, or nobody knows."""
    found = app.get("quality")
    if not found or found["high"] >= found["promised"]:
        return ""
    at = datetime.fromtimestamp(found["since"]).astimezone()
    since = at.strftime("%H:%M" if time.time() - found["since"] < DAY_S else "%Y-%m-%d %H:%M")
    of = f"{app['app']} ({found['variant']})" if "variant" in found else app["app"]
    return f"{of}: promised {found['promised']:.4g}, found {found_words(found)} since {since}"


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End the command: `message` on stderr, exit code 1 (the request failed) or 2 (bad usage)."""
    raise Failure(message, code)


def usage(message: str) -> NoReturn:
    """End the command because of bad usage: `message` on stderr, each of its lines as one fault, exit code 2."""
    *others, last = message.split("\n")
    for one in others:
        progress(f"infaas: {one}")
    raise Failure(last, USAGE)


def show(document: Any, as_json: bool, render: Callable[[Any], None]) -> None:
    """Print one result: as one JSON document, or as text by `render`."""
    if as_json:
        print_json(document)
    else:
        render(document)


def print_json(document: Any, file: TextIO | None = None) -> None:
    """Print one JSON document on one line of stdout (or a file). numpy values become numbers and lists, paths become text."""
    print(json.dumps(document, default=_plain, allow_nan=False), file=file, flush=True)


@contextmanager
def for_the_result() -> Iterator[None]:
    """Send to stderr what is printed within, even by a solver's C code. Only the result goes to stdout."""
    import ctypes  # noqa: PLC0415  (few commands need it)

    sys.stdout.flush()
    library = ctypes.CDLL(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def progress(text: str) -> None:
    """Print one line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


class ProgressBars(Struct, eq=False):
    """Shows how far things are: each with a bar on a terminal, else in lines. bars: None without a terminal."""

    bars: "Progress | None"
    _tasks: "dict[str, TaskID]" = {}
    _said: dict[str, str] = {}

    def __call__(
        self, text: str, done: float, total: float | None = 1.0, *, what: str = "", line: str = "", key: str = ""
    ) -> None:
        """So much is done of the total. what: which of several things.

        Without a terminal, `line` (default: the text) is printed once for each `key` (default: the text).
        """
        if self.bars is None:
            if (key or text) != self._said.get(what):
                self._said[what] = key or text
                progress(line or text)
            return
        if what not in self._tasks:
            self._tasks[what] = self.bars.add_task(text, total=total)
        shown = done if total is None else min(done, 0.999 * total)  # at its total, the clock beside it would stop
        self.bars.update(self._tasks[what], completed=shown, total=total, description=text)


@contextmanager
def progress_bars() -> Iterator[ProgressBars]:
    """Progress on stderr. Leaves a terminal as it was, even after Ctrl-C."""
    if not sys.stderr.isatty():
        yield ProgressBars(None)
        return
    from rich import progress as shown  # noqa: PLC0415  (few commands need it)
    from rich.console import Console  # noqa: PLC0415

    times = shown.TimeElapsedColumn(), shown.TimeRemainingColumn()
    words = shown.TextColumn("{task.description}", markup=False)
    columns = (shown.BarColumn(), shown.TaskProgressColumn(), *times, words)
    with shown.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield ProgressBars(bars)


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())


def _plain(value: Any) -> Any:
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value.hex() if isinstance(value, bytes) else str(value)


class Column(NamedTuple):
    """A column of a table. title: with the unit. value: the item's field, or a function of the item.

    A line break in the title makes a second line of titles. rank: where the table is too wide, columns with the largest rank are left out
    first; those with 0 stay. flows: long texts go on in the next line.
    """

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]
    rank: int = 0
    flows: bool = False


def when(seconds: float | None, timespec: str = "%Y-%m-%d %H:%M") -> str | None:
    """A moment of local time; None where there is none."""
    return datetime.fromtimestamp(seconds).astimezone().strftime(timespec) if seconds else None


def drifted(app: str, columns: Sequence[Mapping[str, Any]]) -> str:
    """Which columns of an app's queries differ from the validation set, the farthest first, how far, and since when."""
    shown = ", ".join(f"{one['column']} ({one['distance']:.2f})" for one in columns[:3])
    more = f" and {len(columns) - 3} more" * (len(columns) > 3)
    since = when(min(one["since"] for one in columns))
    return f"{app}: its queries differ from the validation set since {since}: {shown}{more}"


NARROWEST = 24  # characters of a column that flows
_INDENT = "    "  # of an item's further lines


def line_width() -> int:
    """Characters of a line: as many as the terminal has, or COLUMNS says. In a pipe nothing wraps."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return shutil.get_terminal_size().columns if told else sys.maxsize


def print_table(
    items: Sequence[Mapping[str, Any]], columns: Sequence[Column], empty: str, *, wide: bool = False
) -> None:
    """Print one line for each item, or `empty` if there is none. wide: all columns, also beyond the width of the terminal."""
    if not items:
        print(empty)
        return
    width = sys.maxsize if wide else line_width()
    cells = {
        one: [one.value(item) if callable(one.value) else item.get(one.value) for item in items] for one in columns
    }
    texts = {column: [text(value) for value in values] for column, values in cells.items()}
    full = {one: max(map(len, [*one.title.split("\n"), *values])) for one, values in texts.items()}
    floor = {
        one: max(1, *map(len, [*one.title.split("\n"), *" ".join(values).split()])) for one, values in texts.items()
    }
    least = {one: min(full[one], max(NARROWEST, floor[one])) if one.flows else full[one] for one in columns}
    shown = list(columns)
    while _together(shown, least) > width and any(one.rank for one in shown):
        shown.remove(max(reversed(shown), key=lambda one: one.rank))
    right = {one for one in shown if all(value is None or isinstance(value, (int, float)) for value in cells[one])}
    while _together(shown, least) > width and (wide_ones := [one for one in shown if least[one] > floor[one]]):
        least[max(wide_ones, key=least.__getitem__)] -= 1
    lines = _folded(shown, least, width)
    for place, part in enumerate(lines):
        room = (
            width - len(_INDENT) * (place > 0) - _together(part, least) + sum(least[one] for one in part if one.flows)
        )
        least |= {one: max(least[one], min(full[one], room)) for one in part if one.flows}
    for row in range(-1, len(items)):
        for place, part in enumerate(lines):
            found = [_lines(texts[one][row], least[one]) if row >= 0 else one.title.split("\n") for one in part]
            most = max(1, *map(len, found))
            for line in range(most):
                at = [line - (most - len(one)) * (row < 0) for one in found]  # titles stand at the bottom
                said = [one[i] if 0 <= i < len(one) else "" for one, i in zip(found, at, strict=True)]
                pairs = zip(part, said, strict=True)
                aligned = [cell.rjust(least[one]) if one in right else cell.ljust(least[one]) for one, cell in pairs]
                print((_INDENT * (place > 0) + "  ".join(aligned)).rstrip())
    if len(shown) < len(columns):
        left = ", ".join(one.title.replace("\n", " ") for one in columns if one not in shown)
        progress(f"(not shown: {left}; --wide shows all)")


def _together(columns: Sequence[Column], widths: Mapping[Column, int]) -> int:
    return sum(widths[one] + 2 for one in columns) - 2


def _folded(columns: Sequence[Column], widths: Mapping[Column, int], width: int) -> list[list[Column]]:
    """The columns by the lines that an item takes: one, unless the names are too long for it, which are never broken."""
    lines: list[list[Column]] = [[]]
    for one in columns:
        if lines[-1] and _together([*lines[-1], one], widths) + len(_INDENT) * (len(lines) > 1) > width:
            lines.append([])
        lines[-1].append(one)
    return lines


def _lines(words: str, width: int) -> list[str]:
    if len(words) <= width:
        return [words]
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


COMPUTED = "computed\nUS$/1,000"  # title of a column of `cost_per_1000`: what 1,000 queries cost by the profile, without idle time


def text(value: Any) -> str:
    """A value as text: numbers with three or four digits, None and "" as a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def number(value: float) -> str:
    """A measured number with its significant digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def quality_of(item: Mapping[str, Any]) -> Any:
    """A listed variant's accuracy; where it is measured by another metric than top1 or top5, that with its name, and the unit of an error."""
    accuracy, metric = item.get("accuracy"), str(item.get("metric") or "top1")
    if accuracy is None or metric in ("top1", "top5"):
        return accuracy
    return in_words(number(value_of(accuracy, metric)), item)


def in_words(value: str, item: Mapping[str, Any]) -> str:
    """A listed variant's value of its metric, with the metric's name unless that is top1 or top5, and the unit of an error."""
    metric = str(item.get("metric") or "top1")
    unit = f" {item['unit']}" if item.get("unit") and is_error(metric) else ""
    return value if metric in ("top1", "top5") else f"{metric} {value}{unit}"


def sure_of(item: Mapping[str, Any]) -> Any:
    """The same with the wider half of its 95 % interval, and of how many samples it is: "0.744 ± 0.024 of 1,300"."""
    value, metric = quality_of(item), str(item.get("metric") or "top1")
    ends = [one for name in ("accuracy_low", "accuracy_high") if (one := item.get(name)) is not None]
    half = max((abs(value_of(one, metric) - value_of(item["accuracy"], metric)) for one in ends), default=0.0)
    if not half:
        return value
    of = f" of {item['samples']:,}" if item.get("samples") else ""
    return f"{value if isinstance(value, str) else number(value)} ± {half:.2g}{of}"


def hardware_of(item: Mapping[str, Any]) -> str | None:
    """A listed variant's hardware, and whether it is simulated, or the host of its engine."""
    where = "simulated" if item.get("simulated") else item.get("engine")
    return f"{item.get('hardware')} ({where})" if where else item.get("hardware")


def local_time(at: str) -> str:
    """A time in ISO 8601, converted to local time."""
    return datetime.fromisoformat(at).astimezone().isoformat(" ", "seconds")


def refusal_line(refused: Refused) -> str:
    """A refusal in one line: the reason, the closest variant, the time after which to try again."""
    parts = [refused.told]
    if refused.closest:
        parts.append(f"closest: {_offer(refused.closest)}")
    if refused.retry_after_ms is not None:
        parts.append(f"try again in {number(refused.retry_after_ms)} ms")
    return "; ".join(parts)


def _offer(closest: dict[str, Any]) -> str:
    figures = [
        f"{label} {number(float(value))}{unit}"
        for name, label, unit in (
            ("accuracy", "accuracy", ""),
            ("latency_ms", "latency", " ms"),
            ("cost", "US$", " per 1,000 queries"),
        )
        if isinstance(value := closest.get(name), (int, float))
    ]
    if isinstance(closest.get("accuracy"), (int, float)):
        figures[0] = str(figures[0] if closest.get("metric") in (None, "top1", "top5") else quality_of(closest))
    return f"{closest.get('variant')} ({', '.join(figures)})"


def print_functions(items: Sequence[Mapping[str, Any]]) -> None:
    """Of each version whose owner's functions run as part of these variants: which they are, and how long they take beside the first one. Of each
    cascade: its parts.
    """
    versions = dict[str, str]()
    for item in items:
        if item.get("functions"):
            versions.setdefault(f"{item['model']} {item['version']}", item["functions"])
    for name, said in versions.items():
        print(f"functions of its owner: {name}: {said}, in the sandbox; figures and prices are with them")
    for name, said in {item["variant"]: item["cascade"] for item in items if item.get("cascade")}.items():
        print(f"cascade: {name}: {said}")


def print_variants(columns: Sequence[Column], empty: str, items: list[dict[str, Any]], wide: bool) -> None:
    """A table of variants; then whose owners' functions run as part of them, and of each that computes one item at a time, why it does."""
    print_table(items, columns, empty, wide=wide)
    print_functions(items)
    for variant, reason in {item["variant"]: item["alone"] for item in items if item.get("alone")}.items():
        print(f"one item at a time: {variant}: {reason}")
