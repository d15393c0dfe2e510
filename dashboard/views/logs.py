"""Logs: the last lines of the system's processes, by service, level and text, where their files are on this machine."""

import time
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import streamlit as st

from dashboard import widgets
from dashboard.serve import log_directory
from dashboard.widgets import show_empty
from infaas.logfiles import LEVELS, Line, LogFile

ALL = "all services"
EVERY_S = 2.0
DAY_S = 43_200.0  # age of a line from which times show the day
READ = 2**17  # bytes at each file's end; the page shows the last lines only
COLOURS = {"DEBUG": "#b3b8bf", "INFO": "#56b4e9", "WARNING": "#e69f00", "ERROR": "#d0342c", "CRITICAL": "#b3261e"}

widgets.page_title("Logs", "The last lines of each process, also of a system that has stopped.")


@st.cache_data(ttl=EVERY_S / 2, max_entries=20, show_spinner=False)
def read(directory: str, processes: tuple[str, ...], level: str, count: int, text: str) -> list[Line]:
    """The last lines of these processes, sorted by time."""
    found: list[Line] = []
    for name in processes:
        try:
            found += LogFile(Path(directory) / f"{name}.log").last(10_000, LEVELS[level], READ)
        except OSError:
            continue  # it was removed, or belongs to another user
    found = [line for line in found if text.lower() in f"{line[1]} {line[2]}".lower()]
    return sorted(found, key=lambda line: line[0])[-count:]


directory = log_directory()
try:
    processes = tuple(sorted(path.stem for path in directory.glob("*.log")))
except OSError:
    processes = ()
if not processes:
    show_empty(
        f"There are no logs in {directory.absolute()}.",
        "`infaas up` writes them there. Where the services run on other machines, look there: `infaas logs` on each,"
        " or `docker service logs` in a Swarm.",
    )
    st.stop()
with st.container(horizontal=True, vertical_alignment="bottom"):
    service = st.selectbox("Service", [ALL, *processes], key="service", bind="query-params", width=220)
    level = st.selectbox("Level at least", list(LEVELS), index=1, key="level", bind="query-params", width=150)
    text = st.text_input("Search", key="search", bind="query-params", width=260, icon=":material/search:") or ""
    count = st.selectbox("Lines", [100, 300, 1000], key="lines", bind="query-params", width=110)
    follow = st.toggle("Follow", value=True, key="follow", bind="query-params")
    as_text = st.toggle("As text", key="text", bind="query-params", help="Whole lines, the latest at the end")


def lines() -> None:
    chosen = processes if service == ALL else (service,)
    found = read(str(directory), chosen, level, count, text.strip())
    if not found:
        show_empty("No line meets these filters.", "Choose a lower level or another service, or clear the search.")
        return
    old = found[0][0] < time.time() - DAY_S
    if as_text:
        st.code("\n".join(_written(line, old) for line in found), language=None, wrap_lines=True, height=640)
        return
    shown = pd.DataFrame([(datetime.fromtimestamp(at, UTC), name, *_level(told)) for at, name, told in reversed(found)])
    shown.columns = ["time", "process", "level", "text"]
    shown["time"] = pd.to_datetime(shown["time"], utc=True)
    shown["level"] = [[each] if each else [] for each in shown["level"]]
    widgets.table(
        shown,
        {
            "time": st.column_config.DatetimeColumn("time", format=f"{'D MMM ' * old}HH:mm:ss.SSS"),
            "process": "process",
            "level": widgets.state_column(COLOURS, "level"),
            "text": "text",
        },
        "lines",
        fills=True,
    )


def _level(told: str) -> tuple[str, str]:
    first, _, rest = told.partition(" ")
    return (first, rest.strip()) if first in LEVELS else ("", told)


def _written(line: Line, old: bool) -> str:
    at, name, told = line
    clock = datetime.fromtimestamp(at, UTC).astimezone(widgets.viewer_zone())
    return f"{clock:{'%-d %b ' * old}%H:%M:%S}.{int(1000 * (at % 1)):03} {name:18} {told}"


st.fragment(lines, run_every=EVERY_S if follow else None)()
st.caption(f"Read from {directory.absolute()}; `infaas logs` shows the same in a terminal.")
