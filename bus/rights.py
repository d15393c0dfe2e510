"""Who may publish and subscribe what: one table of all subjects, streams and buckets by role; and whose requests may be answered.

A test holds that every name in `bus.subjects` stands here; another, that services do nothing else. What a role may do on NATS is
the sum of its lines: nothing is allowed because nobody has forbidden it.

Inboxes tell who asks: `_INBOX_.<app>.<name>` of an app's client and `_INBOX_.@.<name>` of those who ask for any app may be
answered by services; `_SERVICE_.<name>` belongs to services that nobody answers but the server.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from bus.subjects import EVERY_SERVER, Subjects

Role = Literal[
    "client",
    "gateway",
    "dashboard",
    "operator",
    "supervisor",
    "dispatcher",
    "executor",
    "monitor",
    "model-autoscaler",
    "vm-autoscaler",
    "registrar",
    "recorder",
    "jobs",
    "offline",
    "container",
    "backup",
]
ROLES: tuple[Role, ...] = get_args(Role)
Verb = Literal["query", "feedback", "explain", "job", "list"]
VERBS: tuple[Verb, ...] = get_args(Verb)  # what an app's client may be allowed
USUAL: tuple[Verb, ...] = ("query", "feedback", "explain", "job")  # `list` shows every app's names
ASKERS: frozenset[Role] = frozenset({"client", "gateway", "dashboard", "operator", "supervisor", "container", "backup"})
OWN = "_INBOX_"  # first token of inboxes whose owner is known
SERVICE = "_SERVICE_"
ANY_APP = "@"  # instead of an app's name


class Identity(NamedTuple):
    """One user of the bus.

    app, verbs: the app of a client, and what it may do there. worker: the one that its processes belong to; `*`: any. buckets: object
    buckets that it may read and write in addition to those of its roles. It may make them unless it is a client.
    """

    name: str
    roles: tuple[Role, ...]
    app: str = ""
    worker: str = "*"
    verbs: tuple[Verb, ...] = USUAL
    buckets: tuple[str, ...] = ()

    @property
    def inbox(self) -> str:
        """The prefix of its inboxes. No other user has it."""
        if self.app:
            return f"{OWN}.{self.app}.{self.name}"
        return f"{OWN}.{ANY_APP}.{self.name}" if ASKERS & set(self.roles) else f"{SERVICE}.{self.name}"


class Rights(NamedTuple):
    """What a user may publish and subscribe: patterns, sorted."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class SubjectRights(NamedTuple):
    """The rights to one name of `Subjects`: the roles that publish there, and those that subscribe.

    of: what stands behind the name, several separated by commas; {app} and {worker}: the identity's own, or any.
    """

    name: str
    of: str
    publish: frozenset[Role] = frozenset()
    subscribe: frozenset[Role] = frozenset()

    def patterns(self, subjects: Subjects, identity: Identity) -> tuple[str, ...]:
        """What it means for this identity."""
        behind = self.of.format(app=identity.app or "*", worker=identity.worker).split(",")
        return tuple(getattr(subjects, self.name)(*tokens.split()) for tokens in behind)


class StoreRights(NamedTuple):
    """The rights to a stream or bucket of `Subjects`. keys: all that roles in `puts` may write there."""

    name: str
    kind: Literal["kv", "objects", "stream"]
    creates: frozenset[Role]
    reads: frozenset[Role] = frozenset()
    writes: frozenset[Role] = frozenset()
    puts: frozenset[Role] = frozenset()
    keys: str = ""


def _r(*roles: Role) -> frozenset[Role]:
    return frozenset(roles)


_SERVICES = frozenset(ROLES) - ASKERS
_ASKING = _r("gateway", "dashboard", "operator", "supervisor")
_SCALING = _r("dispatcher", "model-autoscaler", "offline")  # who has instances loaded, beside the leader

SUBJECT_RIGHTS: tuple[SubjectRights, ...] = (
    # outsiders
    SubjectRights("query", "{app}", _r("client", "gateway", "dashboard", "operator"), _r("dispatcher")),
    SubjectRights("cancel", "{app}", _r("client", "gateway", "dashboard", "operator"), _r("dispatcher")),
    SubjectRights("feedback", "{app}", _r("client", "gateway", "operator"), _r("dispatcher")),
    SubjectRights("explain", "{app}", _r("client", "gateway", "dashboard", "operator"), _r("dispatcher")),
    SubjectRights("list", "", _ASKING | {"client"}, _r("dispatcher", "jobs")),
    SubjectRights("admin", "", _r("operator"), _r("registrar")),
    SubjectRights("register", "", _r("operator", "container"), _r("registrar")),
    SubjectRights(
        "registration",
        "",
        _r("gateway", "operator", "supervisor", "registrar", "container"),
        _r("gateway", "operator", "registrar", "container"),
    ),
    SubjectRights("registration_cancel", "", _r("operator", "dashboard"), _r("registrar")),
    SubjectRights("event", "*", subscribe=_r("operator")),
    SubjectRights("event", "outcome", _r("dispatcher", "executor", "offline", "gateway")),
    SubjectRights("event", "client-error", _r("gateway")),
    SubjectRights("event", "feedback, selection", _r("dispatcher")),
    SubjectRights("event", "state, cost, worker-sample, instance-sample", _r("monitor")),
    SubjectRights("event", "scaling, worker", _r("monitor", "vm-autoscaler")),
    SubjectRights("event", "shadow", _r("operator")),
    SubjectRights("event", "objective, pipeline, drift", _r("vm-autoscaler")),
    SubjectRights("event", "registration, release", _r("registrar")),
    SubjectRights("event", "job", _r("jobs")),
    # a query's way
    SubjectRights("execute", "{worker} *", _r("dispatcher", "offline"), _r("executor")),
    SubjectRights("done", "*", _r("executor", "dispatcher"), _r("dispatcher", "offline")),
    SubjectRights("undelivered", "*", subscribe=_r("dispatcher", "offline")),
    SubjectRights("part", "*", _r("executor"), _r("dispatcher")),
    SubjectRights("ended", "", _r("dispatcher"), _r("executor")),
    SubjectRights("selection", "changed, sought, taken.*, told.*.*.*", _r("dispatcher", "registrar"), _r("dispatcher")),
    SubjectRights("resent", "", _r("dispatcher"), _r("dispatcher", "executor")),
    SubjectRights("resent", "*", _r("dispatcher", "executor"), _r("dispatcher")),
    SubjectRights("echo", "*", _r("dispatcher"), _r("dispatcher")),
    SubjectRights("trying", "*", _r("executor"), _r("dispatcher", "offline")),
    SubjectRights("resubmit", ", *", _r("executor", "dispatcher"), _r("dispatcher", "offline")),
    SubjectRights("loads", "*", _r("monitor"), _r("dispatcher", "model-autoscaler", "offline")),
    # the fleet
    SubjectRights(
        "worker_heartbeat",
        "{worker}",
        _r("monitor"),
        _SCALING | _r("registrar", "vm-autoscaler", "operator", "supervisor", "container"),
    ),
    SubjectRights(
        "dispatcher_heartbeat", "", _r("dispatcher", "offline"), _r("dispatcher", "executor", "gateway", "operator")
    ),
    SubjectRights("demand", "", _r("dispatcher"), _r("vm-autoscaler", "operator")),
    SubjectRights("pipeline", "arrivals", _r("dispatcher"), _r("vm-autoscaler", "operator")),
    SubjectRights("controller", "ask, reply.*.*", _r("monitor"), _r("vm-autoscaler")),
    SubjectRights("controller", "sampled", _r("executor"), _r("vm-autoscaler")),
    SubjectRights("controller", "objectives", _r("vm-autoscaler"), _r("model-autoscaler", "operator")),
    SubjectRights("controller", "history.*", _r("recorder"), _r("vm-autoscaler")),
    SubjectRights("recorder", "demand", _r("vm-autoscaler"), _r("recorder")),
    SubjectRights("machines", "*", _r("vm-autoscaler"), _r("supervisor")),
    SubjectRights("worker", "{worker} load, {worker} release", _SCALING | _r("vm-autoscaler"), _r("monitor")),
    SubjectRights(
        "worker", "{worker} drain", _r("vm-autoscaler", "supervisor", "container", "registrar"), _r("monitor")
    ),
    SubjectRights("worker", "{worker} demand", _r("dispatcher"), _r("model-autoscaler")),
    SubjectRights("executor", "{worker} * *", _r("monitor"), _r("executor")),
    SubjectRights("executor", "{worker} * withdraw", _r("dispatcher"), _r("executor")),
    SubjectRights("executor", "{worker} * echo, {worker} * succeed", _r("executor"), _r("executor")),
    SubjectRights("executor", "{worker} * unheard.*", subscribe=_r("executor")),
    SubjectRights("monitor", "{worker} *", _r("executor"), _r("monitor")),
    SubjectRights("exited", "{worker}", _r("supervisor"), _r("dispatcher", "monitor", "registrar", "offline")),
    # registration work
    SubjectRights("workshop", "{worker}", _r("registrar"), _r("executor", "vm-autoscaler")),
    SubjectRights(
        "registrar",
        "inspected, built, variant-failed, progress, finished",
        _r("executor"),
        _r("registrar", "vm-autoscaler"),
    ),
    SubjectRights("registrar", "container", _r("container"), _r("registrar")),
    SubjectRights("registrar", "release", _r("dispatcher"), _r("registrar")),
    SubjectRights("registrar", "kept", _r("registrar"), _r("executor")),
    SubjectRights("registrar", "alive, undelivered.*.*", _r("registrar"), _r("registrar")),
    # offline jobs
    SubjectRights("job", "{app}", _r("client", "gateway", "operator"), _r("jobs")),
    SubjectRights("job_status", "", _r("client", "gateway", "operator", "jobs"), _r("gateway", "operator", "jobs")),
    SubjectRights("job_cancel", "", _r("client", "gateway", "operator"), _r("jobs")),
    SubjectRights("job_chunks", "", _r("jobs")),
    SubjectRights("offline", "part, note", _r("offline"), _r("jobs")),
    SubjectRights("offline", "alive", _r("jobs"), _r("jobs")),
    SubjectRights("offline_answer", "{worker}", _r("executor", "dispatcher"), _r("offline")),
)

_BUCKETS: dict[
    str, tuple[frozenset[Role], frozenset[Role]]
] = {  # of objects that the registrar makes: who reads, who writes
    "uploads_bucket": (_r("registrar", "executor", "operator", "jobs"), _r("registrar", "operator", "jobs")),
    "artifacts_bucket": (
        _r("registrar", "executor", "recorder", "backup", "vm-autoscaler"),
        _r("registrar", "executor", "recorder", "backup"),
    ),
    "inputs_bucket": (
        _r("executor", "dispatcher", "gateway", "dashboard", "operator"),
        _r("gateway", "dashboard", "operator"),
    ),
    "outputs_bucket": (_r("executor", "dispatcher", "gateway", "dashboard", "operator", "offline"),) * 2,
}
STORE_RIGHTS: tuple[StoreRights, ...] = (
    StoreRights("outcome_stream", "stream", creates=_r("recorder"), reads=_r("recorder", "operator")),
    StoreRights("event_stream", "stream", creates=_r("recorder"), reads=_r("recorder", "operator")),
    StoreRights("job_stream", "stream", creates=_r("jobs"), reads=_r("offline")),
    StoreRights(
        "catalog_bucket",
        "kv",
        creates=_r("registrar"),
        reads=_SERVICES | {"gateway", "operator", "backup"},
        writes=_r("registrar", "backup"),
        puts=_r("dispatcher"),
        keys="quality.>",
    ),
    StoreRights(
        "control_bucket",
        "kv",
        creates=_r("registrar"),
        reads=_r(
            "registrar",
            "vm-autoscaler",
            "monitor",
            "supervisor",
            "recorder",
            "jobs",
            "executor",
            "dispatcher",
            "backup",
        ),
        writes=_r("registrar", "vm-autoscaler", "supervisor", "backup"),
        puts=_r("monitor"),
        keys="quarantine.>",
    ),
    StoreRights(
        "selection_bucket",
        "kv",
        creates=_r("registrar"),
        reads=_r("dispatcher", "registrar", "recorder", "operator", "backup"),
        writes=_r("dispatcher", "registrar", "backup"),
    ),
    StoreRights(
        "status_bucket",
        "kv",
        creates=_r("registrar"),
        reads=_r("registrar", "recorder", "operator", "backup"),
        writes=_r("registrar", "backup"),
    ),
    StoreRights(
        "payloads_bucket",
        "kv",
        creates=_r("registrar"),
        reads=_r("registrar", "operator", "dispatcher"),
        writes=_r("registrar", "executor", "operator"),
    ),
    StoreRights("jobs_bucket", "kv", creates=_r("jobs"), reads=_r("jobs", "offline", "operator"), writes=_r("jobs")),
    *(StoreRights(name, "objects", _r("registrar"), reads, writes) for name, (reads, writes) in _BUCKETS.items()),
    StoreRights(
        "parts_bucket",
        "objects",
        creates=_r("jobs"),
        reads=_r("jobs", "offline", "executor"),
        writes=_r("jobs", "offline"),
    ),
)
# Roles that answer requests: the executor with a query's outputs, the others with what they were asked for.
ANSWERERS: frozenset[Role] = _r("dispatcher", "executor", "registrar", "jobs")
_CLIENT_LINES: dict[Verb, tuple[str, ...]] = {
    "query": ("query", "cancel"),
    "feedback": ("feedback",),
    "explain": ("explain",),
    "job": ("job", "job_status", "job_cancel"),
    "list": ("list",),
}


def rights(identity: Identity, subjects: Subjects) -> Rights:
    """All that this user may publish and subscribe."""
    publish: set[str] = set()
    subscribe = {f"{identity.inbox}.>"}
    allowed = {name for verb in identity.verbs for name in _CLIENT_LINES[verb]}
    for role in identity.roles:
        for line in SUBJECT_RIGHTS:
            if role == "client" and line.name not in allowed:
                continue
            patterns = line.patterns(subjects, identity)
            publish.update(patterns if role in line.publish else ())
            subscribe.update(patterns if role in line.subscribe else ())
        for store in STORE_RIGHTS:
            publish.update(_of_store(role, store, getattr(subjects, store.name)))
        if role in ANSWERERS:
            publish.add(f"{OWN}.>")
        if role == "operator":
            publish.add("$JS.API.INFO")  # how much is stored, for `infaas doctor`
        if role == "dispatcher":
            publish.add(EVERY_SERVER)  # what goes behind all that servers have (bus/natsbehind.py)
        if role == "supervisor":
            publish.add(f"{SERVICE}.>")  # what became of an order to start or stop a machine
    for bucket in identity.buckets:
        publish.update((*_reads_objects(bucket), *_writes_objects(bucket)))
        if not identity.app:
            # Not for clients: the maker of a stream chooses what it hears, and where it sends that.
            publish.update(_creates(f"OBJ_{bucket}"))
    return Rights(tuple(sorted(publish)), tuple(sorted(subscribe)))


def sharing(identities: Iterable[Identity]) -> list[Identity]:
    """The same users, but operators also have the buckets of all others, since they make them for clients."""
    users = list(identities)
    every = tuple(sorted({bucket for user in users for bucket in user.buckets}))
    return [user._replace(buckets=every) if "operator" in user.roles else user for user in users]


def _of_store(role: Role, store: StoreRights, name: str) -> Iterable[str]:
    stream = {"kv": "KV_", "objects": "OBJ_", "stream": ""}[store.kind] + name
    if role in store.creates:
        yield from _creates(stream)
    if role in store.reads or role in store.writes or role in store.puts:
        yield f"$JS.API.STREAM.INFO.{stream}"
    if store.kind == "kv":
        if role in store.reads:
            yield from _reads(stream, f"$KV.{name}")
        if role in store.writes:
            yield f"$KV.{name}.>"
        if role in store.puts:
            yield f"$KV.{name}.{store.keys}"
    elif store.kind == "objects":
        if role in store.reads:
            yield from _reads_objects(name)
        if role in store.writes:
            yield from _writes_objects(name)
    elif role in store.reads:
        yield from _consumes(stream)


def _creates(stream: str) -> Iterable[str]:
    return (f"$JS.API.STREAM.{verb}.{stream}" for verb in ("INFO", "CREATE", "UPDATE"))


def _reads(stream: str, subjects: str) -> Iterable[str]:
    yield f"$JS.API.STREAM.MSG.GET.{stream}"
    yield f"$JS.API.CONSUMER.CREATE.{stream}.*.{subjects}.>"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
    yield f"$JS.API.CONSUMER.DELETE.{stream}.*"


def _reads_objects(bucket: str) -> Iterable[str]:
    return (f"$JS.API.STREAM.INFO.OBJ_{bucket}", *_reads(f"OBJ_{bucket}", f"$O.{bucket}"))


def _writes_objects(bucket: str) -> Iterable[str]:
    stream = f"OBJ_{bucket}"
    yield f"$JS.API.STREAM.INFO.{stream}"
    yield f"$JS.API.STREAM.MSG.GET.{stream}"  # what is to be replaced
    yield f"$JS.API.STREAM.PURGE.{stream}"
    yield f"$O.{bucket}.C.*"
    yield f"$O.{bucket}.M.*"


def _consumes(stream: str) -> Iterable[str]:
    yield f"$JS.API.STREAM.INFO.{stream}"
    yield f"$JS.API.CONSUMER.CREATE.{stream}.>"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
    yield f"$JS.ACK.{stream}.>"
    yield f"$JS.ACK.*.*.{stream}.>"


# -- Whose requests may be answered. Of a message, NATS checks everything but its reply subject.

STREAM = "Nats-Stream"  # header of a message that JetStream sends on request


def from_stream(reply: str, headers: Mapping[str, str] | None) -> bool:
    """Whether JetStream sent this message. Such messages are never orders: a reader of a stream can have it send messages to any subject."""
    return reply.startswith("$JS.") or (headers is not None and STREAM in headers)


def app_of(reply: str) -> str:
    """The app whose client wants the answer at this reply subject. Empty where it is not known, or where the client may ask for any app."""
    first, _, rest = reply.partition(".")
    app = rest.partition(".")[0]
    return app if first == OWN and app != ANY_APP else ""


class ReplyCheck:
    """Checks the reply subjects of outsiders' requests, before an actor sees them.

    inbox: one of the service's own. It shows whether users have inboxes of their own (`infaas auth`). Then only replies to the caller's own
    inbox are allowed. Otherwise every reply subject is, except those of the system and of NATS: an answer there would be an order in
    the service's name.
    """

    def __init__(self, subjects: Subjects, inbox: str) -> None:
        self._space = f"{subjects.prefix}."
        self._closed = inbox.startswith((f"{OWN}.", f"{SERVICE}."))
        self._of_app = (subjects.query(), subjects.cancel(), subjects.feedback(), subjects.explain(), subjects.job())
        self._others = (
            subjects.list(),
            subjects.list("jobs"),
            subjects.admin(),
            subjects.register(),
            subjects.registrar("container"),
            subjects.registration(),
            subjects.registration_cancel(),
            subjects.job_status(),
            subjects.job_cancel(),
        )

    def applies_to(self, inlet: str) -> bool:
        """Whether requests on this subject come from outsiders."""
        return inlet in self._of_app or inlet in self._others

    def may_answer(self, inlet: str, subject: str, reply: str) -> bool:
        """Whether the service may answer at this reply subject. inlet: the pattern on which the request came; subject: its own."""
        if not self._closed:
            return not reply.startswith((self._space, "$"))
        tokens = reply.split(".", 3)
        if len(tokens) < 4 or tokens[0] != OWN:
            return False
        return inlet not in self._of_app or tokens[1] in (ANY_APP, subject.rpartition(".")[2])
