"""What pages share: title, time range, tables in the visitor's time zone, parts that refresh themselves; the controls for a query's needs,
the decision in words, what codes of refusals mean.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pandas as pd
import streamlit as st
from pandas.api.types import is_string_dtype

from bus.messages.catalog import ACCURACIES, in_metric, is_error, value_of
from dashboard import formats
from dashboard.store import NoData, query
from dashboard.window import DEFAULT, RANGES, Window, between, latest
from infaas.answers import why_chosen
from infaas.errors import Refused

CUSTOM = "custom"
ALL_APPS = "all apps"
LINKS: Mapping[
    str, tuple[str, str]
] = {  # column of a table: the page that its names lead to, and the parameter that takes one
    "app": ("applications", "app"),
    "pipeline": ("pipelines", "app"),
    "variant": ("variants", "search"),
    "worker": ("workers", "search"),
    "job": ("jobs", "search"),
    "registration": ("registrations", "search"),
}
ARRIVING = "arriving"  # key of the session: values of the controls of the page that is opened next
PARTS = "parts"  # key of the session: the number of parts that the page has so far
SCREEN = "screen"  # key of a part that takes the rest of the screen's height (app.py)
MOST_ROWS = 12  # of a table that does not scroll
SHORT = 30  # characters of a text that needs no width of its own
SCREEN_PX, CHARACTER_PX = 1238, 6.7  # the width of a table on a usual screen, and of a character in it


def page_title(name: str, description: str) -> None:
    """Show the name of the page and what it is about."""
    st.session_state[PARTS] = 0
    st.title(name, anchor=False)
    st.caption(description)


def choose_window() -> Window:
    """Show the control for the time range, which is kept in the URL (?range=, ?from=, ?to=). Returns the chosen window."""
    chosen = st.segmented_control(
        "Time range",
        [*RANGES, CUSTOM],
        default=DEFAULT,
        required=True,
        key="range",
        bind="query-params",
        label_visibility="collapsed",
    )
    if chosen != CUSTOM:
        return latest(chosen, datetime.now(UTC))
    zone = viewer_zone()
    now = datetime.now(zone).replace(second=0, microsecond=0, tzinfo=None)
    left, right = st.columns(2)
    start = left.datetime_input("From", now - timedelta(hours=1), key="from", bind="query-params", step=60)
    end = right.datetime_input("To", now, key="to", bind="query-params", step=60)
    return between(*((each or now).replace(tzinfo=zone).astimezone(UTC) for each in (start, end)))


def choose_app(all_apps: str | None, *, pipelines: bool = False) -> str | None:
    """Show the control for the app, which is kept in the URL (?app=). all_apps: the option for all apps, if there is one; it gives None.

    pipelines: only those that are pipelines. None: there is no app.
    """
    names = _names(pipelines)

    @st.fragment(run_every=5.0)
    def follow() -> None:
        if _names(pipelines) != names:
            st.rerun()

    follow()
    options = ([] if all_apps is None else [all_apps]) + names
    if not options:
        return None
    chosen = st.selectbox(
        "Pipeline" if pipelines else "Application", options, key="app", bind="query-params", width=280
    )
    return None if chosen == all_apps else chosen


def _names(pipelines: bool) -> list[str]:
    try:
        apps = query("apps")
    except NoData:
        return []  # the page itself shows the reason
    return list(apps.loc[apps["pipeline"], "app"] if pipelines else apps["app"])


class Filter(NamedTuple):
    """Which rows of its tables a page shows. app: only this one's; None: of all. text: only rows in which it occurs."""

    app: str | None
    text: str

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """These rows. Tables without a column `app` belong to all apps."""
        if self.app is not None and "app" in rows:
            rows = rows[rows["app"] == self.app]
        if not self.text or rows.empty:
            return rows
        texts = rows.select_dtypes(exclude=["number", "bool", "datetimetz"]).astype(str)
        found = texts.apply(lambda column: column.str.contains(self.text, case=False, regex=False))
        return rows[found.any(axis=1)]


def choose_rows(*, apps: bool = True, inside: str = "names, states and reasons") -> Filter:
    """Show the controls for the app and a text to search for, which are kept in the URL (?app=, ?search=). inside: where it is looked for."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        return Filter(choose_app(ALL_APPS) if apps else None, choose_text(inside))


def choose_text(inside: str) -> str:
    """Show the control for a text to search for, which is kept in the URL (?search=). inside: where it is looked for."""
    text = st.text_input(
        "Search", key="search", bind="query-params", width=280, placeholder=f"in {inside}", icon=":material/search:"
    )
    return (text or "").strip()


def show_page(name: str, **values: str) -> None:
    """Go to another page. values: of its controls, by key."""
    st.session_state[ARRIVING] = values
    # The new address cannot name what a control of the present page is bound to. Without any parameter, it keeps the present ones.
    st.switch_page(f"views/{name}.py", query_params={"via": "link"})


def take_arrival() -> None:
    """Set the controls of the page that `show_page` has opened, before they are shown."""
    for key, value in st.session_state.pop(ARRIVING, {}).items():
        st.session_state[key] = value
    st.query_params.pop("via", None)


def up_to_now(window: Window) -> Window:
    """The same range at this moment, for parts that refresh themselves."""
    chosen = st.session_state.get("range", DEFAULT)
    return window if chosen == CUSTOM else latest(chosen, datetime.now(UTC))


def viewer_zone() -> ZoneInfo:
    """The visitor's time zone."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")


def local(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its times in the visitor's time zone."""
    zone = viewer_zone()
    times = {name: frame[name].dt.tz_convert(zone) for name in frame.select_dtypes("datetimetz")}
    return frame.assign(**times)


def table(frame: pd.DataFrame, columns: Mapping[str, Any], key: str, *, fills: bool = False) -> None:
    """Show a table of these columns, in this order. A text is the column's title; otherwise it is a column configuration.

    Columns that the frame does not have, or that have no values, are left out. Names of apps, variants and workers lead to their pages. Long
    texts get the width that the others leave. fills: many rows take the rest of the screen.
    """
    shown: Sequence[str] = [name for name in columns if name in frame and not frame[name].isna().all()]
    linked = {name: f"{key}-{name}" for name in shown if name in LINKS and isinstance(columns[name], str)}
    links = {
        name: link_column(columns[name], LINKS[name][0], click, _width(frame[name], columns[name]))
        for name, click in linked.items()
    }
    texts = _texts(
        frame,
        {name: columns[name] for name in shown if name not in linked},
        sum(_width(frame[name], columns[name]) for name in linked),
    )
    many = len(frame) > MOST_ROWS
    height: Any = "content" if not many else "stretch" if fills else 460
    with st.container(key=SCREEN if many and fills else f"table-{key}"):
        st.dataframe(
            local(frame[list(shown)]),
            hide_index=True,
            width="stretch",
            height=height,
            column_config={**columns, **links, **texts},
            key=key,
            placeholder=" ",
        )
    for name, click in linked.items():
        clicked = st.session_state.get(click)
        if clicked and not clicked["label"].startswith("("):  # those in brackets have no page
            show_page(LINKS[name][0], **{LINKS[name][1]: clicked["label"].partition(" ")[0]})


def _texts(frame: pd.DataFrame, columns: Mapping[str, Any], others: float) -> dict[str, Any]:
    """The columns of texts with widths of their own: long ones get what the rest leaves on a usual screen, the shortest of them all that they
    need. others: what further columns take. The pointer shows what is cut (hover.js).
    """
    texts: dict[str, Any] = {}
    long: dict[str, int] = {}
    for name, title in columns.items():
        known = frame[name].dropna()
        if known.empty or not is_string_dtype(known):
            continue
        lengths = known.astype(str).str.len()
        if lengths.max() > SHORT:
            long[name] = int(lengths.max())
        elif not lengths.max() <= lengths[lengths.index.isin(frame.index[:10])].max():
            texts[name] = _wide(title, CHARACTER_PX * lengths.max() + 20)  # the browser looks at the first rows only
    taken = others + sum(_taken(frame[name], title) for name, title in columns.items() if name not in long)
    left = max(SCREEN_PX - taken, 160.0 * len(long))
    for rank, name in enumerate(sorted(long, key=long.__getitem__)):
        width = min(CHARACTER_PX * long[name] + 20, left / (len(long) - rank))
        texts[name], left = _wide(columns[name], width), left - width
    return texts


def _wide(column: Any, width: float) -> dict[str, Any]:
    """A column of texts with this width in pixels. column: its title, or its configuration."""
    config = column if isinstance(column, dict) else st.column_config.TextColumn(column)
    return {**config, "width": int(width)}


def _taken(values: pd.Series, column: Any) -> float:
    """About the width of a column of short values, in pixels."""
    title = str(column["label"] if isinstance(column, dict) else column)
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        return 118.0
    longest = max((len(str(each)) for each in values.dropna()), default=0)
    return CHARACTER_PX * max(len(title) + 2, min(longest, 28)) + 20


def _width(names: pd.Series, title: str) -> int:
    """The width in pixels of a column of names that can be clicked, which have more room around them."""
    return int(CHARACTER_PX * min(max(len(title) + 2, names.dropna().str.len().max()), 2 * SHORT)) + 24


def link_column(title: str, page: str, key: str, width: int | None = None) -> Any:
    """A column of names that can be clicked: then the session has `key`, with `row` and `label`."""
    return st.column_config.ButtonColumn(
        f"{title} ↗",
        type="tertiary",
        alignment="left",
        key=key,
        help=f"A click opens {page.replace('_', ' ')}",
        width=width,
    )


def time_column(title: str = "when", window: Window | None = None) -> Any:
    """A column of times. It shows the day, unless the window is short."""
    form = "HH:mm:ss" if window is not None and window.seconds <= RANGES["6h"] else "D MMM HH:mm:ss"
    return st.column_config.DatetimeColumn(title, format=form, width=None if "D" in form else "small")


STATES: Mapping[str, str] = {
    "Active": "takes queries",
    "Overloaded": "more queries than it can carry in time",
    "Interfered": "slower than alone, because of others on its device",
    "Warm": "in the host's memory, ready to be moved to its device",
    "reclaimable": "not needed now; it goes as soon as others need its room",
    "Draining": "takes no more work, and stops when all is done",
}


def state_column(colours: Mapping[str, str], title: str = "state") -> Any:
    """A column of lists of states, each state in its colour."""
    known = [f"{state}: {meaning}" for state, meaning in STATES.items() if state in colours]
    return st.column_config.MultiselectColumn(
        title, options=list(colours), color=list(colours.values()), help=". ".join(known) or None
    )


def number_column(title: str, form: str = "%.3g", **more: Any) -> Any:
    """A column of numbers."""
    return st.column_config.NumberColumn(title, format=form, **more)


def money_column(title: str, amounts: pd.Series, **more: Any) -> Any:
    """A column of money. If most amounts are tiny, all are written like 1.5e-6, so that they can be compared."""
    known = amounts[amounts > 0]
    tiny = len(known) and known.median() < 1e-4
    return number_column(title, "%.1e" if tiny else "%.3g", **more)


def quality(rows: pd.DataFrame) -> tuple[list[Any], Any]:
    """The column `accuracy` of these rows in the words of those who measured, and how it is shown: numbers, titled by their metric and its
    unit, where all have the same one, else texts that name it. Rows of several models that answered together have the metric of their app.
    """
    every = query("variants")
    known = list(zip(every["metric"].fillna("top1"), every["unit"], strict=True))
    by_variant, by_app = dict(zip(every["variant"], known, strict=True)), dict(zip(every["app"], known, strict=True))
    apps = rows["app"] if "app" in rows else [None] * len(rows)
    named = [
        by_variant.get(one) or by_app.get(app, ("top1", "")) for one, app in zip(rows["variant"], apps, strict=True)
    ]
    values = [
        (None if pd.isna(value) else value, *measure) for value, measure in zip(rows["accuracy"], named, strict=True)
    ]
    if len(set(named)) > 1:
        return [formats.quality(*each) for each in values], st.column_config.TextColumn("accuracy")
    title, form = formats.measure(*(named[0] if named else ("top1", "")))
    numbers = [None if value is None else value_of(value, metric) for value, metric, _ in values]
    return numbers, number_column(title, form, help="As measured on the whole validation set")


def intervals(rows: pd.DataFrame) -> list[str]:
    """The confidence intervals of these rows' accuracies, in their metrics."""
    columns = (rows[name] for name in ("accuracy_low", "accuracy_high", "metric"))
    return [formats.interval(*each) for each in zip(*columns, strict=True)]


PERCENTILES: Mapping[str, Any] = {
    "p50_ms": number_column("p50 ms", help="Half of them were faster"),
    "p99_ms": number_column("p99 ms", help="99 of 100 were faster"),
}


def explain_marks(marks: pd.DataFrame) -> None:
    """Say what the thin lines on the charts above are, if there are any."""
    if not marks.empty:
        st.caption(
            "Thin lines: deployments (violet) and scaling actions (grey). Point at the top of one to see what was done, and why."
        )


def progress_column(title: str) -> Any:
    """A column of percentages, as bars."""
    return st.column_config.ProgressColumn(title, format="%.0f %%", min_value=0, max_value=100, width=100)


def metric(label: str, value: str, note: str, *, help: str | None = None, bad: bool = False) -> None:
    """Show one figure of a row of figures. note: a few words below it. bad: show the note in red."""
    st.metric(
        label,
        value,
        note,
        delta_color="inverse" if bad else "off",
        delta_arrow="off",
        border=True,
        help=help,
        height="stretch",
    )


def show_live(window: Window | None, part: Callable[[], None]) -> None:
    """Show a part of the page, and refresh it at the window's interval. If it has no data, the reason is shown in its place.

    Only the first part of a page reports that the database cannot be reached.
    """
    every = 5.0 if window is None else window.refresh
    number = st.session_state.get(PARTS, 0)
    st.session_state[PARTS] = number + 1

    @wraps(part)
    def show() -> None:
        try:
            part()
        except NothingToShow as nothing:
            show_empty(*nothing.args)
        except NoData as problem:
            if problem.away and number:
                return
            st.error(f"**No data:** {problem}", icon=":material/cloud_off:")
            st.markdown(problem.remedy)

    st.fragment(show, run_every=every or None)()


class NothingToShow(Exception):
    """Ends a part of a page. args: as for `show_empty`."""


def need(rows: pd.DataFrame, what: str, remedy: str) -> None:
    """Without rows, the part of the page that `show_live` shows ends here, and says so as `show_empty` does."""
    if rows.empty:
        raise NothingToShow(what, remedy)


def show_empty(what: str, remedy: str) -> None:
    """Show that there is nothing to show, and what would change that."""
    st.info(f"{what}\n\n{remedy}", icon=":material/info:")


def show_no_app() -> None:
    """Show that there is no app. Raises NoData where the database cannot say so."""
    query("apps")
    show_empty("No application is registered yet.", "`infaas register` adds one; `infaas demo` shows a whole system.")


MEANING = {
    "late": "answered, but after the objective",
    "deadline": "no answer would have been in time",
    "overloaded": "all suitable instances were full",
    "unsatisfiable": "no variant has what was asked for: ask for less, or register a better model",
    "unknown_app": "no app of this name is registered: infaas apps lists those that are",
    "unknown_model": "the app has no model or variant of this name: the page Applications lists its variants",
    "bad_request": "a field was wrong: what the client was told names it and says what is right",
    "model_error": "the model failed on these inputs",
    "too_large": "the inputs were too large for one message",
    "forbidden": "the caller may not do this",
    "cancelled": "its client took it back, or had gone",
    "internal": "a fault of the system: see its logs",
}


def choose_needs(app: str) -> dict[str, Any]:
    """Show the controls for the needs of a query of this app, which are kept in the URL. Returns those that are set. Raises NoData."""
    rows = query("variants")
    mine = rows[rows["app"] == app]
    number: dict[str, Any] = {"value": None, "format": "%g", "bind": "query-params", "width": 170}
    metric = next((one for one in mine["metric"] if one not in (None, *ACCURACIES)), "accuracy")
    bounds: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "step": 0.01} if metric == "accuracy" else {}
    named = f"{formats.heading(metric)} at {'most' if is_error(metric) else 'least'}"
    choice: dict[str, Any] = {"index": None, "bind": "query-params", "width": 170, "placeholder": "any"}
    with st.container(horizontal=True):
        asked: dict[str, Any] = {
            "latency_ms": st.number_input("Within, ms", 0.0001, key="latency_ms", placeholder="any time", **number),
            metric: st.number_input(named, key=metric, placeholder="any", **bounds, **number),
            "cost": st.number_input(
                "US$/1,000 at most",
                0.0,
                key="cost",
                step=0.001,
                placeholder="any price",
                help="US$ per 1,000 queries",
                **number,
            ),
            "model": st.selectbox("Only model", sorted(mine["model"].unique()), key="model", **choice),
            "variant": st.selectbox("Only variant", sorted(mine["variant"]), key="variant", **choice),
        }
    return {name: value for name, value in asked.items() if value is not None}


def show_verdict(answer: dict[str, Any]) -> None:
    """Show which variant an explanation has chosen and why, or why a query would be refused."""
    chosen = answer.get("chosen")
    if chosen:
        name = chosen.get("variant") if isinstance(chosen, dict) else chosen
        known = [each for each in answer.get("candidates") or [] if each["variant"] == name]
        worker = known[0].get("worker") if known else None
        functions = known[0].get("functions") if known else ""
        within = f" Functions of its owner run within it: {functions}." * bool(functions)
        st.success(
            f"**{name}** would answer{f', on {worker}' if worker else ''}: {why_chosen(answer)}.{within}",
            icon=":material/check_circle:",
        )
        return
    refusal = answer.get("refusal")
    if refusal:
        refused = Refused.from_map({"error": refusal})
        st.warning(
            f"It would be refused as **{refused.code}**: {refused.message}.{alternative(refused)}",
            icon=":material/block:",
        )
    else:
        st.warning("No variant would answer it now.", icon=":material/block:")


def alternative(refused: Refused) -> str:
    """The closest variant, and when another try may succeed."""
    closest, later = refused.closest or {}, refused.retry_after_ms
    metric, unit = closest.get("metric", "top1"), closest.get("unit", "")
    figures = [in_metric(closest["accuracy"], metric, unit)] * (closest.get("accuracy") is not None)
    figures += [f"latency {formats.number(closest['latency_ms'])} ms"] * (closest.get("latency_ms") is not None)
    text = f" Closest: **{closest['variant']}** ({', '.join(figures)})." if closest.get("variant") else ""
    return text + (f" Try again in {formats.number(later)} ms." if later is not None else "")
