"""Moments as options say them: a date, a time, or so long ago."""

import re
from datetime import datetime, timedelta

from infaas.cli.output import usage

_AGO = re.compile(r"-(\d+(?:\.\d+)?)(s|m|min|h|d|w)\Z")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def moment(text: str, option: str, now: datetime) -> float:
    """Unix seconds. A date is its midnight; what names no time zone is local time. Ends the command where it makes no sense."""
    text = text.strip()
    if text == "now":
        return now.timestamp()
    if ago := _AGO.match(text):
        try:
            return (now - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])).timestamp()
        except OverflowError:
            usage(f"{option} {text}: is too long ago")
    try:
        found = datetime.fromisoformat(text)
        return (found.astimezone() if found.tzinfo is None else found).timestamp()
    except (ValueError, OverflowError):
        usage(f"{option} {text}: is no time: write 2026-11-17, 2026-11-17T08:00, 2026-11-17T08:00Z, -24h or now")


def shown(at: str) -> str:
    """A time in ISO 8601 for people, where they are."""
    return datetime.fromisoformat(at).astimezone().isoformat(" ", "seconds")
