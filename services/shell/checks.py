"""What settings may be: one rule for each, and what must hold between several. Pure; `settings.load` says where a bad one stood.

Every setting has a rule here (a test holds it). Keys of maps are written *: `machines.kinds.*.minimum`.
"""

import re
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from bus.subjects import NAME
from services.core.emulation import KINDS, MOST
from services.shell.machinechecks import faults_of

if TYPE_CHECKING:
    from services.shell.settings import Settings

_DAY = 86400.0


class Fault(NamedTuple):
    """What is wrong with one setting. key: as in a file, section.name. reason: what it must be, and what it is."""

    key: str
    reason: str


class Number(NamedTuple):
    """A number from `least` to `most`. above: `least` itself is too little. zero: 0 is right as well, and means this."""

    least: float = 0.0
    most: float = inf
    above: bool = False
    zero: str = ""

    def refuse(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None if isinstance(value, str) else "must be a number"  # "auto" and the like: the type has told
        if self.zero and value == 0:
            return None
        value = max(-1e300, min(value, 1e300)) if isinstance(value, int) else value  # larger ones are no float
        if isfinite(value) and (value > self.least if self.above else value >= self.least) and value <= self.most:
            return None
        low = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        high = f" and at most {self.most:g}" if self.most < inf else ""
        if self.zero:
            low = f"{low} (0: {self.zero})" if self.least == 0 and not self.above else f"0 ({self.zero}), or {low}"
        return f"must be {low}{high}, not {value:g}"


class Text(NamedTuple):
    """A text that matches. told: how to write it."""

    pattern: str
    told: str

    def refuse(self, value: Any) -> str | None:
        return None if re.fullmatch(self.pattern, str(value)) else f"must be {self.told}, not {str(value)!r}"


Rule = Number | Text | None  # None: whatever its type allows

_NAME = NAME.pattern.removesuffix(r"\Z")
_TOKEN = Text(_NAME, "1 to 64 letters, digits, - or _, a letter or digit first")
_NAMED = Text(f"({_NAME})?", "empty, or 1 to 64 letters, digits, - or _, a letter or digit first")
_SOMETHING = Text(r"(?s).*\S.*", "some text")
_SECONDS = Number(above=True, most=_DAY)
_WAIT = Number(most=365 * _DAY)
_SHARE = Number(most=1.0)
_PART = Number(above=True, most=1.0)
_COUNT = Number(1, 1e9)
_AMOUNT = Number(most=1e9)
_MEMORY = Number(most=1e8, zero="what the machine has")
_CORES = Number(most=4096, zero="what the machine has")
_SIMULATED = Number(most=MOST)
_KEPT = Number(1 / 24, 36500, zero="for ever")
_AGGREGATED = Number(2, 36500, zero="for ever")  # what comes a day late is still counted

_COMMAND = Text(r"(?s)[^\0]*", "words of a command")
_TOKENS = Text(r"[\x21-\x7e\s]*", "tokens without spaces or commas inside, as `openssl rand -hex 32` makes them")

RULES: Mapping[str, Rule] = {
    "prefix": _TOKEN,
    "goal": None,
    "data_dir": _SOMETHING,
    "log_level": Text("(?i)debug|info|warning|error|critical", "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
    "bus.url": Text(r"\S+", "a URL as nats://host:4222"),
    "bus.nkey_seed": None,
    "bus.inbox": Text(r"([^\s*>.]+\.)*[^\s*>.]*", "empty, or a subject without wildcards, as _INBOX_.app.name"),
    "bus.tls_ca": None,
    "bus.tls_certificate": None,
    "bus.tls_key": None,
    "bus.known": None,
    "bus.adopt": None,
    "bus.replicas": Number(most=5, zero="as many as there are servers, up to 3"),
    "bus.max_payload": Number(1024, 64 * 2**20),  # NATS itself takes no more
    "bus.outcome_bytes": Number(1024, 1e18),
    "bus.event_bytes": Number(1024, 1e18),
    "store.dsn": None,
    "store.reader_dsn": None,
    "store.timescale": None,
    "store.keep_days.query_outcomes": _AGGREGATED,
    "store.keep_days.cost_events": _AGGREGATED,
    "store.keep_days.state_events": _KEPT,
    "store.keep_days.scaling_events": _KEPT,
    "store.keep_days.worker_events": _KEPT,
    "store.keep_days.worker_samples": _KEPT,
    "store.keep_days.instance_samples": _KEPT,
    "store.keep_days.slo_by_app_minutely": _KEPT,
    "dashboard.address": _SOMETHING,
    "dashboard.port": Number(1, 65535),
    "dashboard.public_url": Text(r"(https?://[^\s/]+(/\S*)?)?", "empty, or a URL: https://host or https://host/path"),
    "dashboard.login": None,
    "dashboard.allow": None,
    "dispatcher.count": Number(1, 64),
    "dispatcher.policy": Text(
        r"infaas|round-robin|brute-force|[\w.]+:\w+", "infaas, round-robin, brute-force or module:Class"
    ),
    "dispatcher.dispatch": Text("auto|spread|pack", "auto, spread or pack"),
    "dispatcher.default_deadline_s": _SECONDS,
    "dispatcher.max_inline": Number(0, 64 * 2**20),
    "dispatcher.probe_share": _SHARE,
    "dispatcher.failure_timeout_s": _SECONDS,
    "dispatcher.max_attempts": Number(1, 100),
    "dispatcher.max_queue": _COUNT,
    "executor.inline_below_ms": Number(most=1000.0),
    "executor.watchdog": Number(1.0, 1e6),
    "executor.watchdog_least_s": _SECONDS,
    "monitor.heartbeat_s": Number(above=True, most=60.0),
    "monitor.sample_s": Number(above=True, most=3600.0),
    "monitor.cost_s": Number(above=True, most=3600.0),
    "monitor.overloaded_backlog_s": Number(most=_DAY, zero="by hardware"),
    "monitor.overloaded_slo_share": _PART,
    "monitor.interfered_ratio": Number(1.0, 1e6, above=True, zero="by hardware"),
    "monitor.interfered_least_ms": Number(most=1e6),
    "monitor.interfered_load_share": Number(most=1.0, zero="by hardware"),
    "monitor.clear_ratio": Number(1.0, 1e6, zero="by hardware"),
    "monitor.least_items": _COUNT,
    "monitor.mitigate_after_s": _WAIT,
    "monitor.mitigate_again_s": _WAIT,
    "monitor.quarantine_after": Number(most=1e6, zero="never"),
    "monitor.memory_share": _PART,
    "monitor.cores_overcommit": Number(1.0, 1e6),
    "monitor.idle_s": _WAIT,
    "registrar.allow_torchscript": None,
    "registrar.memory_mb": Number(64, 1e8),
    "registrar.seconds": _SECONDS,
    "registrar.max_model_mb": Number(1, 1e6),
    "registrar.agreement": _SHARE,
    "registrar.threads": Number(1, 1024),
    "registrar.max_batches": Number(1, 65536),
    "worker.name": _NAMED,
    "worker.kind": _NAMED,
    "worker.hardware": _TOKEN,
    "worker.cores": _CORES,
    "worker.memory_mb": _MEMORY,
    "worker.gpus": Number(most=1024),
    "worker.simulate.*": _SIMULATED,
    "worker.drain_s": Number(most=3600, zero="not at all"),
    "worker.executor_nkey": None,
    "worker.monitor_nkey": None,
    "autoscaler.policy": None,
    "autoscaler.solver": None,
    "autoscaler.period_s": Number(above=True, most=3600.0),
    "autoscaler.slack": Number(above=True, most=1000.0),
    "autoscaler.loading_weight": Number(most=1e6),
    "autoscaler.objective": None,
    "autoscaler.time_limit_s": Number(above=True, most=3600.0),
    "autoscaler.hold_s": _WAIT,
    "autoscaler.budget_per_hour": Number(most=1e9, zero="no limit"),
    "autoscaler.choice.*.variant": _TOKEN,
    "autoscaler.choice.*.instances": Number(1, 1e6),
    "machines.provider": None,
    "machines.period_s": Number(above=True, most=3600.0),
    "machines.utilisation_above": _PART,
    "machines.overloaded_share": _PART,
    "machines.idle_s": _WAIT,
    "machines.lease_s": Number(0.2, 3600.0),
    "machines.kinds.*.minimum": Number(most=10_000),
    "machines.kinds.*.maximum": Number(most=10_000),
    "machines.kinds.*.boot_s": _WAIT,
    "machines.kinds.*.cores": _CORES,
    "machines.kinds.*.memory_mb": _MEMORY,
    "machines.kinds.*.simulate.*": _SIMULATED,
    "machines.kinds.*.accelerators.*": _SIMULATED,
    "machines.kinds.*.accelerator_mb": Number(most=1e8, zero="by kind"),
    "machines.swarm.hosts": Text(
        r"[\s,]*((unix|tcp|https?)://[^\s,]+[\s,]*)*",
        "addresses as tcp://engine-proxy:2375 or unix:///var/run/docker.sock",
    ),
    "machines.swarm.token": None,
    "machines.swarm.timeout_s": Number(0.1, 60.0),
    "machines.swarm.dry_run": None,
    "machines.swarm.add": _COMMAND,
    "machines.swarm.remove": _COMMAND,
    "machines.swarm.command_s": _SECONDS,
    "machines.command.add": _COMMAND,
    "machines.command.remove": _COMMAND,
    "machines.command.command_s": _SECONDS,
    "machines.command.dry_run": None,
    "prices.per_hour.*": _AMOUNT,
    "jobs.roots": None,
    "jobs.utilisation_below": _SHARE,
    "jobs.latency_ratio": Number(1.0, 1e6),
    "jobs.latency_least_ms": Number(most=1e6),
    "jobs.batch_ms": Number(above=True, most=1e6),
    "jobs.chunk_items": Number(1, 1e6),
    "jobs.chunk_kb": Number(1, 64 * 2**10),
    "jobs.window": Number(1, 1e6),
    "jobs.in_flight": Number(1, 1e6),
    "jobs.keep": _AMOUNT,
    "gateway.address": Text(r"[\w.:-]+", "an address to listen on, as 127.0.0.1 or 0.0.0.0"),
    "gateway.port": Number(most=65535, zero="off"),
    "gateway.grpc_port": Number(most=65535, zero="off"),
    "gateway.reuse_port": None,
    "gateway.drain_s": Number(most=60.0),
    "gateway.admin": None,
    "gateway.tokens": _TOKENS,
    "gateway.operator_tokens": _TOKENS,
    "gateway.tls_certificate": None,
    "gateway.tls_key": None,
    "gateway.cors_origins": Text(r"[\s,]*((\*|https?://[^\s/,]+)[\s,]*)*", "origins as https://example.org, or *"),
    "gateway.hosts": Text(r"[\w.:\[\]*\s,-]*", "names of hosts, as models.example.org"),
    "gateway.max_body": Number(1024, 2**31),
    "gateway.max_header": Number(256, 2**20),
    "gateway.head_timeout_s": _SECONDS,
    "gateway.body_timeout_s": _SECONDS,
    "gateway.idle_timeout_s": _SECONDS,
    "gateway.connections": Number(1, 1e6),
    "gateway.in_flight": Number(1, 1e6),
    "gateway.register_hosts": Text(
        r"[\w.:=\[\]\s,-]*", "names of hosts, as models.example.org or store.internal=10.1.2.3"
    ),
    "gateway.register_max_bytes": Number(1024, 1e12),
    "engine.address": Text(r"[\w.:-]+", "an address to listen on, as 127.0.0.1 or 0.0.0.0"),
    "engine.port": Number(1, 65535),
    "engine.socket": _SOMETHING,
    "engine.token": Text(r"[\x21-\x7e]*", "empty, or a token without spaces, as `openssl rand -hex 32` makes them"),
    "metrics.enabled": None,
    "metrics.host": Text(r"[\w.:-]+", "an address to listen on, as 127.0.0.1 or 0.0.0.0"),
    "metrics.port": Number(most=65535, zero="none"),
    "metrics.series": Number(1, 1e6),
    "telemetry.otlp_endpoint": Text(r"(https?://[^\s/]+(/\S*)?)?", "empty, or a URL as http://host:4318"),
}
# Maps whose keys become part of subjects, or must be known.
_KEYS: Mapping[str, Rule] = {
    "machines.kinds.*": _TOKEN,
    "prices.per_hour.*": _TOKEN,
    "worker.simulate.*": Text("|".join(KINDS), f"a kind that can be simulated ({', '.join(KINDS)})"),
    "machines.kinds.*.simulate.*": Text("|".join(KINDS), f"a kind that can be simulated ({', '.join(KINDS)})"),
    "machines.kinds.*.accelerators.*": Text("|".join(KINDS), f"a kind of accelerator ({', '.join(KINDS)})"),
}


def faults(settings: "Settings") -> Iterator[Fault]:
    """Everything that is wrong with these settings: single ones first, then what does not go together."""
    wrong = False
    for key, pattern, value in leaves(settings):
        rule = RULES.get(pattern)
        reason = rule.refuse(value) if rule is not None else None
        if reason is not None:
            wrong = True
            yield Fault(key, reason)
    for key, pattern, name in _names(settings):
        rule = _KEYS.get(pattern)
        reason = rule.refuse(name) if rule is not None else None
        if reason is not None:
            wrong = True
            yield Fault(key, f"the name {reason}")
    if not wrong:
        yield from _together(settings)


def leaves(value: Any, key: str = "", pattern: str = "") -> Iterator[tuple[str, str, Any]]:
    """All single values: key, the same with * for names in maps, and the value. Lists: each of their items."""
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name), f"{key}.{name}".lstrip("."), f"{pattern}.{name}".lstrip("."))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}", f"{pattern}.*")
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item, key, pattern)
    else:
        yield key, pattern, value


def _names(value: Any, key: str = "", pattern: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from _names(getattr(value, name), f"{key}.{name}".lstrip("."), f"{pattern}.{name}".lstrip("."))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"{key}.{name}", f"{pattern}.*", name
            yield from _names(item, f"{key}.{name}", f"{pattern}.*")


def _together(settings: "Settings") -> Iterator[Fault]:
    """Settings that are right by themselves and wrong beside each other."""
    bus, monitor, registrar, jobs = settings.bus, settings.monitor, settings.registrar, settings.jobs
    if 0 < monitor.interfered_ratio <= monitor.clear_ratio:
        yield Fault(
            "monitor.clear_ratio",
            f"must be below monitor.interfered_ratio ({monitor.interfered_ratio:g}), not {monitor.clear_ratio:g}: "
            "an instance would be Interfered and clear at once",
        )
    if settings.dispatcher.failure_timeout_s <= monitor.heartbeat_s:
        yield Fault(
            "dispatcher.failure_timeout_s",
            f"must be above monitor.heartbeat_s ({monitor.heartbeat_s:g}), not {settings.dispatcher.failure_timeout_s:g}: "
            "every worker would count as dead between two of its heartbeats",
        )
    if settings.dispatcher.max_inline >= bus.max_payload:
        yield Fault(
            "dispatcher.max_inline",
            f"must be below bus.max_payload ({bus.max_payload}), not {settings.dispatcher.max_inline}: "
            "such a body would fit in no message",
        )
    if jobs.chunk_kb * 1024 >= bus.max_payload:
        yield Fault(
            "jobs.chunk_kb",
            f"must be below bus.max_payload ({bus.max_payload} bytes), not {jobs.chunk_kb} KB: "
            "such a chunk would fit in no message",
        )
    yield from _gateway(settings)
    for key, values in (("threads", registrar.threads), ("max_batches", registrar.max_batches)):
        if not values:
            yield Fault(f"registrar.{key}", "must name at least one number")
    for key, reason in faults_of(settings.machines):
        yield Fault(key, reason)


def _gateway(settings: "Settings") -> Iterator[Fault]:
    gateway = settings.gateway
    if bool(gateway.tls_certificate) != bool(gateway.tls_key):
        missing = "tls_key" if gateway.tls_certificate else "tls_certificate"
        yield Fault(f"gateway.{missing}", "must name a file, too: a certificate and its key belong together")
    if gateway.port == 0 and gateway.grpc_port == 0:
        yield Fault(
            "gateway.port", "must not be 0 where gateway.grpc_port is 0, too: there would be nothing to listen on"
        )
    elif gateway.port == gateway.grpc_port:
        yield Fault("gateway.grpc_port", f"must be another than gateway.port, not {gateway.grpc_port}")
