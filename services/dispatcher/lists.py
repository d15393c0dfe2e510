"""Lists: the replies to `infaas.list.<what>`, with the numbers that decisions use. Pure."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from bus.messages.catalog import AppRecord, ModelRecord, PipelineRecord, VariantRecord, error_of
from bus.messages.public import Error, Listing, ListRequest, Refusal
from bus.messages.quality import AppQuality
from bus.messages.scaling import PipelineReplicas
from bus.subjects import WITHOUT_APP
from services.core.catalog import Catalog, target_of
from services.core.cost import HANDLING_MS
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.graph import PipelineGraph
from services.core.release import ReleaseBook, figures, lacks
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import AppView, VariantInstances
from services.core.selection.instances import Worker
from services.core.validation import WrongField, check_name
from services.dispatcher.pipeline_run import SeenItems
from services.dispatcher.stages import service_seconds

# Fields that an item has as its record does.
APP = (
    "app",
    "latency_ms",
    "accuracy",
    "accuracy_mean",
    "worth",
    "quality_act",
    "payloads",
    "default_output",
    "min_instances",
    "replicas",
    "created",
)
MODEL = ("model", "version", "task", "metric", "labels", "format", "created")
VARIANT = (
    "model", "version", "variant", "hardware", "framework", "precision", "threads", "max_batch", "alone", "arithmetic", "accuracy",
    "accuracy_low", "accuracy_high", "samples", "model_accuracy", "metric", "contexts", "agreement", "differing", "dominated", "simulated",
)  # fmt: skip
PROFILE = ("load_ms", "init_ms", "transfer_ms", "host_mb", "provenance", "memory_mb", "saturation_qps")
DEVICE = (
    "device", "kind", "alive", "cores", "cores_used", "memory_mb", "memory_used_mb", "cores_reclaimable", "memory_reclaimable_mb",
    "utilisation", "foreign_use", "host_used_mb", "price_per_hour", "simulated",
)  # fmt: skip
INSTANCE = ("state", "reclaimable", "load", "latency_ms", "mean_batch", "batching")
PLAN = ("policy", "status", "cost_per_s", "p99_ms", "percentile", "rate", "latency_ms", "hop_ms", "accuracy")
STAGE = ("variant", "hardware", "batch", "replicas", "scale", "rho", "accuracy")


KINDS = ("apps", "models", "variants", "workers", "pipelines", "releases")


def _of(record: object, names: tuple[str, ...]) -> dict[str, Any]:
    """These fields of a record; all None where there is none."""
    return {name: None if record is None else getattr(record, name) for name in names}


class Lists(Struct, frozen=True):
    """The items of each kind, as they are asked for. kept: replicas of deployed pipelines. hops: by planned variant, what a batch was measured to take
    beyond its profile. unserved: why nobody can serve an app. seen: items of answers, by pipeline and the vertex that is asked for them. shown: an app's
    variants, in the context that is asked for.
    """

    ask: ListRequest
    now: float
    catalog: Catalog
    view: ClusterView
    slo_target: float
    kept: Mapping[str, PipelineReplicas] = {}
    hops: Mapping[str, MeasuredHop] = {}
    unserved: Callable[[str], str] = lambda _: ""
    seen: Callable[[str, str], SeenItems | None] = lambda *_: None
    releases: ReleaseBook = ReleaseBook()
    shown: Callable[[AppView], tuple[VariantRecord, ...]] = attrgetter("records")

    def of(self, what: str) -> Listing | Refusal:
        """The items of one kind. An unknown kind is a bad_request that names the known ones."""
        try:
            check_name(self.ask.app, "app")
            check_name(self.ask.model, "model")
        except WrongField as error:
            return Refusal(error=Error(code="bad_request", message=str(error)))
        if what in KINDS:
            items: list[dict[str, Any]] = getattr(self, f"_{what}")()
            return Listing(items=items)
        text = f"there is no list of {what!r}: ask for {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        return Refusal(error=Error(code="bad_request", message=text))

    def _apps(self) -> list[dict[str, Any]]:
        """stage_of: the pipelines of which it is a vertex. Their visits are parts of queries, which no figure of the app counts as queries."""
        stages: dict[str, set[str]] = {}
        for app in self.catalog.apps:
            for vertex in app.pipeline.vertices if app.pipeline is not None else ():
                stages.setdefault(vertex.app, set()).add(app.app)
        return [
            {
                **_of(app, APP),
                "models": sorted(app.links),
                "versions": dict(app.links),
                "variants": len(self.catalog.variants_of(app.app)),
                "slo_target": target_of(app, self.slo_target),
                "expects": [msgspec.to_builtins(one) for one in app.expects],
                "selection": None if app.selection is None else asdict(app.selection),
                "pipeline": None if app.pipeline is None else msgspec.to_builtins(app.pipeline),
                "unserved": self.unserved(app.app) or None,
                "quality": _quality(self.catalog.quality(app.app), self.catalog.variants_of(app.app)),
                "stage_of": sorted(stages.get(app.app, ())),
                "inputs": _specs(app.signature.inputs) if app.signature else [],
                "outputs": _specs(app.signature.outputs) if app.signature else [],
                "labels": self.catalog.classes_of(app),
            }
            for app in sorted(self.catalog.apps, key=lambda app: app.app)
            if self.ask.app in (None, app.app) and (self.ask.model is None or self.ask.model in app.links)
        ]

    def _releases(self) -> list[dict[str, Any]]:
        """The last release of each app. lacks: what its step waits for. figures: of each step and measure, what was counted, in which more is better."""
        items = []
        for app in sorted(self.catalog.apps, key=lambda app: app.app):
            release = app.release
            if release is None or self.ask.app not in (None, app.app) or self.ask.model not in (None, release.model):
                continue
            counted = self.releases.of(app.app, release)
            items.append(
                {
                    "app": app.app,
                    **asdict(release),
                    "share": release.share,
                    "lacks": lacks(release, counted, self.now) if release.state in ("mirror", "step") else "",
                    "figures": [
                        {
                            "step": one.step + 1, "measure": one.name, "of": one.of, "new": one.new.mean, "new_n": one.new.count, "old": one.old.mean,
                            "old_n": one.old.count, **dict(zip(("low", "high"), one.interval, strict=True)), "margin": one.margin,
                        }
                        for one in figures(release, counted)
                    ],
                }
            )  # fmt: skip
        return items

    def _models(self) -> list[dict[str, Any]]:
        items = []
        for model in sorted(self.catalog.models, key=lambda m: (m.model, m.created)):
            apps = sorted(self.catalog.apps_linking(model.model))
            if self.ask.model not in (None, model.model) or (
                self.ask.app is not None and not _concerns(model, self.ask.app, self.catalog)
            ):
                continue
            serving = [
                a for a in apps if (record := self.catalog.app(a)) and record.links[model.model] == model.version
            ]
            items.append(
                {
                    **_of(model, MODEL),
                    "app": None if model.app == WITHOUT_APP else model.app,
                    "apps": apps,
                    "serving": serving,
                    "inputs": _specs(model.signature.inputs),
                    "outputs": _specs(model.signature.outputs),
                    "functions": "" if model.functions is None else model.functions.words,
                    "variants": len(self.catalog.variants_at(model.model, model.version)),
                }
            )
        return items

    def _variants(self) -> list[dict[str, Any]]:
        items = []
        for name, app in sorted(self.view.apps.items()):
            if name.startswith("_") or self.ask.app not in (None, name):
                continue
            for i, (group, record) in enumerate(zip(app.groups, self.shown(app), strict=True)):
                hop = self.hops.get(record.variant)
                serves = (
                    app.current[i] or app.serving[True][i]
                    if self.ask.version is None
                    else record.version == self.ask.version
                )
                if self.ask.model not in (None, record.model) or not serves:
                    continue
                instances = (*group.active, *group.loading, *group.troubled)
                hourly = self.view.nominal_price_per_s(record) * 3600.0
                items.append(
                    {
                        "app": name,
                        **_of(record, VARIANT),
                        **_production(record, self.catalog.quality(name) if self.ask.context is None else None),
                        "accuracy_at": record.remeasured
                        or ((of := self.catalog.model(record.model, record.version)) and of.created),
                        "engine": record.profile.host.get("engine"),
                        "functions": "" if record.functions is None else record.functions.words,
                        "cascade": "" if record.cascade is None else record.cascade.words,
                        "batching": "+".join(sorted({one.status.batching for one in instances})) or record.batching,
                        "unit": record.signature.target[1],
                        **_of(record.profile, PROFILE),
                        "latency_ms": group.table.seconds(1) * 1000.0,
                        "batch_latency_ms": _by_batch(group),
                        "p99_ms": _p99(record),
                        "hop_ms": None if hop is None else hop.ms,
                        "hop_quantiles_ms": None if hop is None else hop.quantiles_ms,
                        "price_per_hour": hourly,
                        "cost_per_1000": float(app.cost[i]),
                        "state": state_of(group, app, self.view),
                        "quarantined": self.view.quarantines(record.variant),
                        "instances": len(instances),
                        "reclaimable": sum(one.status.reclaimable for one in instances),
                    }
                )
        return items

    def _pipelines(self) -> list[dict[str, Any]]:
        """edges: with `items_seen`, of the last answers that this dispatcher had: answers, mean, dispersion (null: it had none)."""
        found = []
        for app in sorted(self.catalog.apps, key=lambda app: app.app):
            if app.pipeline is None or self.ask.app not in (None, app.app):
                continue
            plan = app.plan
            found.append(
                {
                    "app": app.app,
                    "latency_ms": app.latency_ms,
                    "slo_target": target_of(app, self.slo_target),
                    "quality": _quality(live := self.catalog.quality(app.app), ()),
                    "measured": [] if live is None else _measured(live),
                    "plan": None if plan is None else _of(plan, PLAN),
                    "plan_ended": app.plan_ended or None,
                    "vertices": _stages(app, app.pipeline, self.view, self.kept.get(app.app)),
                    "edges": [
                        msgspec.to_builtins(edge)
                        | ({"items_seen": _asdict(self.seen(app.app, edge.target))} if edge.items else {})
                        for edge in app.pipeline.edges
                    ],
                    "output": app.pipeline.output,
                    "inputs": _specs(app.signature.inputs) if app.signature else [],
                    "outputs": _specs(app.signature.outputs) if app.signature else [],
                    "created": app.created,
                }
            )
        return found

    def _workers(self) -> list[dict[str, Any]]:
        return [
            {
                "worker": worker.name,
                "hardware": worker.hardware,
                "kind": worker.kind,
                "state": _state_of(worker),
                "incarnation": worker.incarnation,
                "last_seen_s": round(self.now - worker.seen, 3),
                "clock_skew_ms": round(worker.skew * 1000.0, 3),
                "devices": [_of(device, DEVICE) for device in worker.devices.values()],
                "instances": [
                    {
                        "instance": i.id,
                        "variant": i.record.variant,
                        "device": i.device,
                        **_of(i.status, INSTANCE),
                        "queued": i.own + i.others,
                        "batch_limit": i.most,
                        "contexts": i.contexts,
                        "factor": i.factor,
                    }
                    for i in worker.instances.values()
                ],
                "simulated": all(d.simulated for d in worker.devices.values()),
            }
            for worker in sorted(self.view.workers.values(), key=lambda w: w.name)
        ]


def _quality(found: AppQuality | None, variants: Iterable[VariantRecord]) -> dict[str, Any] | None:
    """What labels say of an app's answers, beside what was promised; without labels, what references say of the variant that they show to be the
    worst; None: nothing.
    """
    if found is None or found.answers is None:
        left = [(one.truth.accuracy, one) for one in variants if one.truth is not None]
        accuracy, worst = min(left, key=lambda one: one[0], default=(0.0, None))
        if worst is None or worst.truth is None:
            return None
        return {
            "variant": worst.variant,
            "promised": worst.measured,
            "found": accuracy,
            **asdict(worst.truth),
        }
    return {"promised": found.promised, "found": found.answers.accuracy, **asdict(found.answers)}


def _specs(specs: list[Any]) -> list[dict[str, Any]]:
    """columns, unit: as its owner has named them, where it has."""
    return [msgspec.to_builtins(spec) for spec in specs]


def _concerns(model: ModelRecord, app: str, catalog: Catalog) -> bool:
    """Whether a version was made for this app, or may answer for it, of a model that it links."""
    record = catalog.app(app)
    linked = record is not None and model.model in record.links
    return model.app == app or (
        record is not None and linked and model.version in catalog.versions_for(record, model.model)
    )


def _production(record: VariantRecord, found: AppQuality | None) -> dict[str, Any]:
    """accuracy: that counts now, by accuracy_source; registered: that of the validation set. live: what labels say, whatever counts."""
    accuracy, source = record.production or (record.measured, "registered")
    live = record.live if found is None else found.variants.get(record.variant)
    return {
        "accuracy": accuracy,
        "accuracy_source": source,
        "registered": record.measured,
        "live": None if live is None else asdict(live),
        "error": error_of(accuracy, record.metric),
    }


def _by_batch(group: VariantInstances) -> dict[str, float]:
    """Milliseconds of a batch, with its overhead, by the sizes that were measured, which are texts: not all clients take other keys."""
    sizes = {min(row.batch, group.record.max_batch) for row in group.record.profile.rows}
    return {str(size): group.table.seconds(size) * 1000.0 + HANDLING_MS for size in sorted(sizes)}


def _p99(record: VariantRecord) -> dict[str, list[float | None]]:
    """The lower end of its interval, P99 in ms as measured, and the upper end, by size of the batch; of the longest inputs."""
    rows = record.profile.rows
    longest = max((row.length or 0 for row in rows), default=0)
    return {
        str(row.batch): [row.p99_low_ms, row.p99_ms, row.p99_high_ms] for row in rows if (row.length or 0) == longest
    }


def _measured(live: AppQuality) -> list[dict[str, Any]]:
    """What labels say of each combination of variants of a pipeline. product: of their accuracies."""
    return [{"stages": name, "product": live.products.get(name), **asdict(one)} for name, one in live.variants.items()]


def _asdict(seen: SeenItems | None) -> dict[str, Any] | None:
    return None if seen is None else seen._asdict()


def _stages(
    app: AppRecord, pipeline: PipelineRecord, view: ClusterView, kept: PipelineReplicas | None
) -> list[dict[str, Any]]:
    """service_ms: as planned, else of the variant that would be chosen without a limit of latency. share: of the objective, by the service
    times on the longest path through the stage. instances, loading, queued: of the planned variant, else of the vertex's app.
    replicas, wanted: as planned, and as the leading VM-autoscaler keeps them now; missing: why not all of them are there.
    """
    planned = {} if app.plan is None else app.plan.vertices
    graph = PipelineGraph(pipeline)
    service = service_seconds(app, view.apps)
    before, behind = graph.before(service), graph.behind(service)
    rows = []
    for vertex in pipeline.vertices:
        stage, name = planned.get(vertex.name), vertex.name
        served = view.apps.get(vertex.app)
        groups = [
            group
            for group in (served.groups if served is not None else ())
            if stage is None or group.record.variant == stage.variant
        ]
        instances = [one for group in groups for one in (*group.active, *group.troubled)]
        longest = before[name] + service[name] + behind[name]
        rows.append(
            {
                "vertex": name,
                "app": vertex.app,
                "inputs": vertex.inputs,
                "accuracy_required": vertex.accuracy,
                **_of(stage, STAGE),
                "wanted": None if stage is None or kept is None else kept.replicas.get(name),
                "missing": None if stage is None or kept is None else kept.missing.get(name),
                "service_ms": 1000.0 * service[name] or None if stage is None else stage.service_ms,
                "share": service[name] / longest if longest else None,
                "instances": len(instances),
                "loading": sum(len(group.loading) for group in groups),
                "queued": sum(one.own + one.others for one in instances),
            }
        )
    return rows


def _state_of(worker: Worker) -> str:
    """The state that people see. Booting: its monitor sends heartbeats, but none of its executors has been alive yet."""
    if worker.draining:
        return "Draining"
    if any(device.alive for device in worker.devices.values()):
        return "Ready"
    return "Down" if worker.was_alive else "Booting"


def state_of(group: VariantInstances, app: AppView, view: ClusterView) -> str:
    """The best state of any instance of a variant, for this app. Quarantined if no worker would load it."""
    if group.active:  # where accuracy is the goal, Overloaded ones are among them
        return "Active" if any(i.state_for(app.app.app) == "Active" for i in group.active) else "Overloaded"
    if group.troubled:
        return group.troubled[0].state_for(app.app.app)
    if group.loading:
        return "Loading"
    if group.warm:
        return "Warm"
    shut = frozenset(view.quarantines(group.record.variant))
    if not shut:
        return "Inactive"
    record = group.record
    free = view.least_utilised(record.hardware, shut, simulated=record.simulated)
    return "Quarantined" if free is None else "Inactive"
