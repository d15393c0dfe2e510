"""What all pages have: a title, the range of time, tables in the visitor's time zone."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pandas as pd
import streamlit as st

from dashboard.store import NoData, ask
from dashboard.window import DEFAULT, RANGES, Window, between, latest

CUSTOM = "custom"


def title(name: str, told: str) -> None:
    """The page's name and what it tells."""
    st.session_state[PARTS] = 0
    st.title(name, anchor=False)
    st.caption(told)


def choose_window() -> Window:
    """The control for the range of time, kept in the address as ?range= (and ?from=, ?to=); returns what is chosen."""
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


def choose_app(everything: str | None) -> str | None:
    """The control for the application, kept in the address as ?app=. everything: what stands for all of them, if that may be chosen."""
    try:
        names = list(ask("apps")["app"])
    except NoData:
        names = []  # the page says why
    options = ([] if everything is None else [everything]) + names
    if not options:
        return None
    chosen = st.selectbox("Application", options, key="app", bind="query-params", width=280)
    return None if chosen == everything else chosen


def again(window: Window) -> Window:
    """The same range as it is at this moment, for parts that follow the system."""
    chosen = st.session_state.get("range", DEFAULT)
    return window if chosen == CUSTOM else latest(chosen, datetime.now(UTC))


def viewer_zone() -> ZoneInfo:
    """The visitor's time zone."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")


def local(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its times in the visitor's zone."""
    zone = viewer_zone()
    times = {name: frame[name].dt.tz_convert(zone) for name in frame.select_dtypes("datetimetz")}
    return frame.assign(**times)


def table(
    frame: pd.DataFrame,
    columns: Mapping[str, Any],
    key: str,
    *,
    height: int | Literal["content"] = "content",
) -> None:
    """A table of these columns, in their order; a text is the column's title, else a column configuration.

    Columns that the frame does not have, or of which it knows nothing, are left out.
    """
    shown: Sequence[str] = [name for name in columns if name in frame and not frame[name].isna().all()]
    st.dataframe(
        local(frame[list(shown)]),
        hide_index=True,
        width="stretch",
        height=height,
        column_config=dict(columns),
        key=key,
        placeholder=" ",
    )


def when(title: str = "when", window: Window | None = None) -> Any:
    """A column of times, with the day where it is not clear which."""
    form = "HH:mm:ss" if window is not None and window.seconds <= RANGES["6h"] else "D MMM HH:mm:ss"
    return st.column_config.DatetimeColumn(title, format=form, width=None if "D" in form else "small")


def state(colours: Mapping[str, str], title: str = "state") -> Any:
    """A column of lists of states, each in its colour."""
    return st.column_config.MultiselectColumn(title, options=list(colours), color=list(colours.values()))


def figure(title: str, form: str = "%.3g", **more: Any) -> Any:
    """A column of numbers."""
    return st.column_config.NumberColumn(title, format=form, **more)


def dollars(title: str, amounts: pd.Series, **more: Any) -> Any:
    """A column of money; where most are tiny, all are written as 1.5e-6, so that sizes can be compared at a glance."""
    known = amounts.dropna()
    tiny = len(known) and known.median() < 1e-4
    return figure(title, "%.1e" if tiny else "%.3g", **more)


def progress(title: str) -> Any:
    """A column of percentages, drawn as bars."""
    return st.column_config.ProgressColumn(title, format="%.0f %%", min_value=0, max_value=100)


def metric(label: str, value: str, told: str, *, help: str | None = None, bad: bool = False) -> None:
    """One figure in a row of them. told: a few words below it; bad: in red."""
    st.metric(
        label,
        value,
        told,
        delta_color="inverse" if bad else "off",
        delta_arrow="off",
        border=True,
        help=help,
        height="stretch",
    )


# -- Parts of a page that follow the system by themselves, and what is shown while there is nothing to show.

PARTS = "parts"  # in the session: how many parts the page has so far


def follow(window: Window | None, part: Callable[[], None]) -> None:
    """Draw a part of the page now, and again as often as its window is worth it; trouble is told in its place.

    That there is no database at all is told once a page, by its first part.
    """
    every = 5.0 if window is None else window.refresh
    number = st.session_state.get(PARTS, 0)
    st.session_state[PARTS] = number + 1

    @wraps(part)
    def guarded() -> None:
        try:
            part()
        except NoData as trouble:
            if trouble.away and number:
                return
            st.error(f"**No data:** {trouble}", icon=":material/cloud_off:")
            st.markdown(trouble.remedy)

    st.fragment(guarded, run_every=every or None)()


def nothing(what: str, remedy: str) -> None:
    """Say that something is empty, and how it would not be."""
    st.info(f"{what}\n\n{remedy}", icon=":material/info:")
