"""What the recorder shows: whether history gets into the database. Pure."""

from collections.abc import Iterable

from services.core.metric import Family
from services.recorder.actor import STREAMS, Recorder


def families(actor: Recorder) -> Iterable[Family]:
    failing = Family("infaas_recorder_failures_in_a_row", "gauge", "Tries since the last success, by what is tried.")
    for what in {*STREAMS, *actor._failures}:
        failing.add(actor._failures.get(what, 0), what=what)
    written = Family(
        "infaas_recorder_batches_total", "counter", "Batches of events that are in the database, by stream."
    )
    for stream, count in actor.written.items():
        written.add(count, stream=stream)
    return failing, written


def missing(actor: Recorder, now: float) -> str:
    del now
    failing = [stream for stream in STREAMS if actor._failures.get(stream)]
    return f"success in writing {', '.join(failing)}" if failing else ""
