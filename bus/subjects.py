"""Names of subjects, streams and buckets, all derived from the prefix, and the grammar of subjects, wildcards and keys.

Systems with different prefixes on one NATS never see each other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from bus.port import BusError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
DISPATCHERS = "dispatchers"  # queue group that shares the queries
REGISTRARS = "registrars"
EXECUTORS = "executors"  # a device's executor process and its successor
RECORDERS = "recorders"
JOBS = "jobs"
WITHOUT_APP = "_"  # instead of an app's name: a model on its own, registered or queried without any app


def valid_name(name: object) -> bool:
    """Whether `name` may be an app, model, version or variant (it becomes a subject token)."""
    return isinstance(name, str) and NAME.match(name) is not None


@dataclass(frozen=True)
class Subjects:
    """All names under one prefix."""

    prefix: str = "infaas"

    # outsiders
    def query(self, app: str = "*") -> str:
        return f"{self.prefix}.query.{app}"

    def feedback(self, app: str = "*") -> str:
        return f"{self.prefix}.feedback.{app}"

    def explain(self, app: str = "*") -> str:
        return f"{self.prefix}.explain.{app}"

    def list(self, what: str = "*") -> str:
        return f"{self.prefix}.list.{what}"

    def admin(self, verb: str = "*") -> str:
        return f"{self.prefix}.admin.{verb}"

    def register(self) -> str:
        return f"{self.prefix}.register"

    def registration(self, registration: str = "*") -> str:
        return f"{self.prefix}.registration.{registration}"

    def registration_cancel(self, registration: str = "*") -> str:
        return f"{self.prefix}.registration-cancel.{registration}"

    def event(self, kind: str) -> str:
        return f"{self.prefix}.event.{kind}"

    # a query's way
    def execute(self, worker: str, device: str) -> str:
        return f"{self.prefix}.execute.{worker}.{device}"

    def done(self, dispatcher: str) -> str:
        return f"{self.prefix}.done.{dispatcher}"

    def undelivered(self, dispatcher: str, uid: str = "*") -> str:
        """Reply subject of a forwarded query: NATS answers there with 503 when the execute subject is dead."""
        return f"{self.prefix}.done.{dispatcher}.{uid}"

    def trying(self, dispatcher: str) -> str:
        """Where executors name a suspect query that they run alone."""
        return f"{self.prefix}.trying.{dispatcher}"

    def echo(self, dispatcher: str) -> str:
        """Where a dispatcher hears itself."""
        return f"{self.prefix}.echo.{dispatcher}"

    def resubmit(self, dispatcher: str = "") -> str:
        """Where executors give queries back: to their dispatcher while it lives, otherwise to the dispatchers' queue group."""
        return f"{self.prefix}.resubmit.{dispatcher}" if dispatcher else f"{self.prefix}.resubmit"

    def resent(self, dispatcher: str = "") -> str:
        """Where dispatchers and executors are asked who has a query that its client sends again, and where a dispatcher hears who has."""
        return f"{self.prefix}.resent.{dispatcher}" if dispatcher else f"{self.prefix}.resent"

    def part(self, dispatcher: str, uid: str = "*") -> str:
        """Where a dispatcher hears the answers to the parts of its queries."""
        return f"{self.prefix}.part.{dispatcher}.{uid}"

    def ended(self, dispatcher: str = "*") -> str:
        """Where executors hear which of a dispatcher's queries with parts have ended."""
        return f"{self.prefix}.ended.{dispatcher}"

    def selection(self, what: str) -> str:
        """Between dispatchers. what: changed (weights of a context) | sought (the prediction that a feedback is for) | taken.<dispatcher>"""
        return f"{self.prefix}.selection.{what}"

    def pipeline(self, what: str) -> str:
        """what: arrivals (of queries at pipelines with a plan, told by dispatchers)"""
        return f"{self.prefix}.pipeline.{what}"

    def loads(self, dispatcher: str) -> str:
        """Where a dispatcher hears what became of its `EnsureLoaded`."""
        return f"{self.prefix}.loads.{dispatcher}"

    # fleet
    def worker_heartbeat(self, worker: str = "*") -> str:
        return f"{self.prefix}.heartbeat.worker.{worker}"

    def dispatcher_heartbeat(self, dispatcher: str = "*") -> str:
        return f"{self.prefix}.heartbeat.dispatcher.{dispatcher}"

    def demand(self, dispatcher: str = "*") -> str:
        """What dispatchers were asked for, by requirement class, all workers together."""
        return f"{self.prefix}.demand.{dispatcher}"

    def controller(self, what: str) -> str:
        """what: ask (heard by the one that leads) | objectives (what it publishes of all apps)"""
        return f"{self.prefix}.controller.{what}"

    def recorder(self, what: str) -> str:
        """what: demand (what the queries of an app were, by the minute)"""
        return f"{self.prefix}.recorder.{what}"

    def machines(self, order: str) -> str:
        """order: start | stop"""
        return f"{self.prefix}.machines.{order}"

    def worker(self, worker: str, order: str) -> str:
        """order: load | release | drain | demand (what dispatchers were asked for and this worker took, for its autoscaler)"""
        return f"{self.prefix}.worker.{worker}.{order}"

    def executor(self, worker: str, device: str, order: str) -> str:
        """order: load | unload | demote | move | withdraw (of queries, by a dispatcher) | echo (to itself) | unheard (what a dispatcher did not get) | succeed (by its successor)"""
        return f"{self.prefix}.executor.{worker}.{device}.{order}"

    def monitor(self, worker: str, fact: str) -> str:
        """fact: loaded | failed | unloaded | moved | report"""
        return f"{self.prefix}.monitor.{worker}.{fact}"

    def exited(self, worker: str = "*", device: str = "*") -> str:
        return f"{self.prefix}.exited.{worker}.{device}"

    # registration work
    def workshop(self, worker: str, order: str = "*") -> str:
        """order: inspect | build | cancel"""
        return f"{self.prefix}.workshop.{worker}.{order}"

    def registrar(self, fact: str) -> str:
        """fact: inspected | built | variant-failed | progress | finished; container: a question"""
        return f"{self.prefix}.registrar.{fact}"

    # offline jobs
    def job(self, app: str = "*") -> str:
        return f"{self.prefix}.job.{app}"

    def job_status(self, job: str = "*") -> str:
        return f"{self.prefix}.job-status.{job}"

    def job_cancel(self, job: str = "*") -> str:
        return f"{self.prefix}.job-cancel.{job}"

    def job_chunks(self, job: str = "*") -> str:
        """Chunks of a job's input, in the work queue `job_stream`."""
        return f"{self.prefix}.offline.chunks.{job}"

    def offline(self, fact: str) -> str:
        """fact: part | note | alive"""
        return f"{self.prefix}.offline.{fact}"

    def offline_answer(self, worker: str, uid: str = "*") -> str:
        """Where a worker's runner hears what became of its queries."""
        return f"{self.prefix}.offline.answer.{worker}.{uid}"

    # streams and buckets
    @property
    def outcome_stream(self) -> str:
        return f"{self._upper}_OUTCOMES"

    @property
    def event_stream(self) -> str:
        return f"{self._upper}_EVENTS"

    @property
    def job_stream(self) -> str:
        return f"{self._upper}_JOBS"

    @property
    def jobs_bucket(self) -> str:
        """Offline jobs: what each is, how far it is, and its last status."""
        return f"{self.prefix}-jobs"

    @property
    def parts_bucket(self) -> str:
        """Outputs of chunks until they are written into the job's output, and chunks too large for a message; they expire."""
        return f"{self.prefix}-job-parts"

    @property
    def catalog_bucket(self) -> str:
        return f"{self.prefix}-catalog"

    @property
    def control_bucket(self) -> str:
        """Who leads: one key, changed by compare-and-set."""
        return f"{self.prefix}-control"

    @property
    def selection_bucket(self) -> str:
        """What selection policies have learnt, by app and context: `<app>.<digest of the context or _>`."""
        return f"{self.prefix}-selection"

    @property
    def status_bucket(self) -> str:
        """Last status of registrations."""
        return f"{self.prefix}-status"

    @property
    def uploads_bucket(self) -> str:
        return f"{self.prefix}-uploads"

    @property
    def artifacts_bucket(self) -> str:
        return f"{self.prefix}-artifacts"

    @property
    def inputs_bucket(self) -> str:
        """Inputs too large for one message, each the MessagePack of a query's field `inputs`; they expire."""
        return f"{self.prefix}-inputs"

    @property
    def outputs_bucket(self) -> str:
        """Outputs too large for one message, each the MessagePack of an Answer's field `outputs`; they expire."""
        return f"{self.prefix}-outputs"

    @property
    def _upper(self) -> str:
        return self.prefix.upper().replace("-", "_")


EVERY_SERVER = "$SYS.REQ.ACCOUNT.PING.STATZ"  # each NATS server answers, with numbers of the asker's own account

# -- Grammar, the same for every bus

MOST_SUBJECT = 1000  # bytes; a server closes connections whose control lines (subject, reply subject, sizes) pass 4096
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*\Z")


def check_subject(subject: str) -> None:
    """Refuse what could end a protocol line and begin another one. Raises BusError."""
    if not subject or " " in subject or not subject.isprintable():
        raise BusError(f"{subject[:80]!r} is not a subject: it is empty, or has spaces or control characters")
    if len(subject) > MOST_SUBJECT or (not subject.isascii() and len(subject.encode()) > MOST_SUBJECT):
        raise BusError(f"{subject[:80]!r}... is longer than the {MOST_SUBJECT} bytes that a subject may have")


def check_pattern(pattern: str) -> None:
    """Tokens joined by dots, `*` for any one of them, `>` at the end for all the rest. Raises BusError."""
    check_subject(pattern)
    tokens = pattern.split(".")
    for place, part in enumerate(tokens):
        wild = "*" in part or ">" in part
        if not part or (wild and len(part) > 1) or (part == ">" and place < len(tokens) - 1):
            raise BusError(f"{pattern!r} is not a subject to listen on: an empty token, or a misplaced wildcard")


def check_key(key: str) -> None:
    """Raises BusError for what a key-value bucket cannot have as a key."""
    if not _KEY.match(key):
        raise BusError(f"{key!r} is no key: letters, digits and - / _ = in parts joined by dots")


def check_headers(headers: Mapping[str, str]) -> None:
    """Names are printable ASCII without colon or space, values have no line breaks. Raises BusError."""
    for name, value in headers.items():
        if not name or not name.isascii() or not name.isprintable() or ":" in name or " " in name:
            raise BusError(f"{name!r} is no header name: printable ASCII without colon or space")
        if "\r" in value or "\n" in value:
            raise BusError(f"the value of header {name!r} has line breaks")


@lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """Whether `pattern` covers `subject`."""
    wanted = pattern.split(".")
    given = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(want in ("*", have) for want, have in zip(wanted, given, strict=True))
