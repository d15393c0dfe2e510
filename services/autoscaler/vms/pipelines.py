"""Deployed pipelines: their planned replicas are kept, and follow their traffic (InferLine, paper 004, section 5). Pure.

The leader has a tuner for each app with a plan. When the tuner decides, all stages get their new numbers in the same turn: what is missing
is ordered at once, the rest of the planning keeps it, the control bucket has it for the next leader, and an event says it of each vertex.
Several vertices, also of different pipelines, may be served by one variant: then their replicas add up.
"""

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import PipelinePlan, PipelineVertex, PlannedStage
from bus.messages.events import PipelineEvent
from bus.messages.scaling import PipelineArrivals, PipelineReplicas
from services.autoscaler.vms.commands import STORE_S, SaveReplicas, Turn
from services.autoscaler.vms.planner import FleetPlanner
from services.autoscaler.vms.problem import FleetProblems, Reservation
from services.core.actor import Do, Effect, Record
from services.core.catalog import Catalog, KeptReplicas
from services.core.cost import load_seconds
from services.core.demand import expected_qps, variants_for
from services.core.metric import MetricFamily, gauge
from services.core.pipelines.planners import make_tuner
from services.core.pipelines.tuner import LOOK_S, TunerDecision


class _Change(NamedTuple):
    """Other numbers of replicas. rate: queries/s that they are for; window: seconds in which it was seen."""

    pipeline: str
    action: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    rate: float | None
    window: float | None
    reason: str
    variants: Mapping[str, str]  # by vertex, also of vertices that end


def _digest(plan: PipelinePlan) -> str:
    """Of what its replicas depend on. Which variants serve its stages may change under a plan."""
    stages = [(name, stage.hardware, stage.batch, stage.replicas) for name, stage in sorted(plan.vertices.items())]
    return blake2b(encode((plan.rate, plan.envelope, plan.dispersion, stages)), digest_size=8).hexdigest()


class DeployedPipeline:
    """One pipeline with a plan. state: as the control bucket is to have it. tuner: None if the plan does not say what traffic it is for."""

    def __init__(self, plan: PipelinePlan, state: PipelineReplicas, now: float, **foreseen: Any) -> None:
        self.plan = plan
        self.state = state
        self.saved: PipelineReplicas | None = None
        self.tuner = make_tuner(plan, now, state.replicas, **foreseen)


class PipelineReplication(Struct, eq=False):
    """It acts only in turns in which its controller leads. plans: the leader plans for all workers, so the plan releases what is too much.

    deployed: by name. stored: as the control bucket has it. known: all of the catalogue has been read.
    """

    catalog: Catalog
    planner: FleetPlanner
    problems: FleetProblems
    plans: bool
    deployed: dict[str, DeployedPipeline] = {}
    known: bool = False
    stored: KeptReplicas = field(default_factory=KeptReplicas)
    _adopted: bool = False
    _ended: set[str] = set()  # whose records are still to be deleted

    # -- the control bucket

    def not_saved(self, pipeline: str) -> None:
        """The record was not written or deleted. The next review tries again."""
        if pipeline in self.deployed:
            self.deployed[pipeline].saved = None
        else:
            self._ended.add(pipeline)

    def forget(self) -> None:
        """A new epoch begins: with what an earlier leader has left in the control bucket."""
        self.deployed.clear()
        self._ended.clear()
        self._adopted = False

    # -- decisions

    @property
    def planned(self) -> dict[str, PipelinePlan]:
        """The deployed plans of the catalogue."""
        return {app.app: app.plan for app in self.catalog.apps if app.plan is not None and app.pipeline is not None}

    def told(self, report: PipelineArrivals, leaving: Collection[str], turn: Turn) -> list[Effect]:
        """A dispatcher's report of arrivals. leaving: workers that are being removed. Empty unless replicas change."""
        one = self.deployed.get(report.pipeline)
        decision = (
            one.tuner.told(report.start, report.counts, turn.now, report.asked)
            if one is not None and one.tuner
            else None
        )
        if one is None or decision is None:
            return []
        return self._carry_out([self._decided(one, decision, turn)], leaving, turn)

    def review(self, leaving: Collection[str], turn: Turn) -> list[Effect]:
        """What was deployed and ended since, what is calm now, and what is missing of the replicas that are kept."""
        if not self.known:
            return []
        found: list[_Change] = []
        planned = self.planned
        for name, plan in sorted(planned.items()):
            found += self._deploy(name, plan, turn)
        gone = set(self.deployed) if self._adopted else {*self.deployed, *self.stored}
        self._adopted = True
        for name in sorted(gone - planned.keys()):
            found.append(self._end(name))
        for one in self.deployed.values():
            decision = one.tuner.told(turn.now, (), turn.now) if one.tuner else None  # what is calm sends no report
            found += [self._decided(one, decision, turn)] if decision is not None else []
            found += self._retargeted(one)
        return self._carry_out(found, leaving, turn)

    def _deploy(self, name: str, plan: PipelinePlan, turn: Turn) -> list[_Change]:
        """Begin with a plan that is new, or go on with what an earlier leader has left of the same one."""
        old = self.deployed.get(name)
        if old is not None and old.plan is plan:
            return []
        state = old.state if old is not None else self.stored.get(name)
        digest = _digest(plan)
        review_s = self.problems.limits.settings.period_s  # of a pipeline that is not asked nobody reports sooner
        foreseen = {
            "forecaster": self.problems.settings.forecaster,
            "said": lambda now, ahead_s: expected_qps(self.catalog.app(name), now, ahead_s + review_s),
        }
        if state is not None and state.plan == digest:
            if old is None:
                self.deployed[name] = DeployedPipeline(plan, state, turn.now, **foreseen)
            else:
                old.plan = plan
            return []
        replicas = {vertex: max(1, stage.replicas) for vertex, stage in plan.vertices.items()}
        new = PipelineReplicas(
            pipeline=name,
            epoch=turn.epoch,
            plan=digest,
            replicas=replicas,
            variants={},
            lambda_max=plan.rate,
            at=turn.now,
            target=self._target(name),
        )
        self.deployed[name] = DeployedPipeline(plan, new, turn.now, **foreseen)
        self._ended.discard(name)
        before, variants = (state.replicas, state.variants) if state is not None else ({}, {})
        why = f"planned by {plan.policy} for {plan.rate:.4g} queries/s"
        return [_Change(name, "deploy", before, replicas, plan.rate, None, why, variants)]

    def _target(self, name: str) -> float | None:
        app = self.catalog.app(name)
        return None if app is None else app.slo_target

    def _retargeted(self, one: DeployedPipeline) -> list[_Change]:
        """The app's target has changed under its plan, which goes on: its replicas and their headroom are for another one."""
        state, target = one.state, self._target(one.state.pipeline)
        if target == state.target:
            return []
        one.state = replace(state, target=target)
        planned = one.plan.percentile
        if target is None or target == planned:
            return []
        kept = state.replicas
        why = f"the target is {100 * target:g} % of the queries in time, and the plan is for {100 * planned:g} %: plan and deploy again"
        return [_Change(state.pipeline, "target", kept, kept, state.lambda_max, None, why, state.variants)]

    def _end(self, name: str) -> _Change:
        one = self.deployed.pop(name, None)
        state = one.state if one is not None else self.stored[name]
        self._ended.add(name)
        app = self.catalog.app(name)
        why = "the pipeline was deleted" if app is None else app.plan_ended or "the plan was taken back"
        return _Change(name, "end", state.replicas, {}, None, None, why, state.variants)

    @staticmethod
    def _decided(one: DeployedPipeline, decision: TunerDecision, turn: Turn) -> _Change:
        before, rate = one.state, decision.lambda_max
        one.state = replace(before, replicas=decision.replicas, lambda_max=rate, at=turn.now)
        return _Change(
            before.pipeline,
            decision.action,
            before.replicas,
            decision.replicas,
            rate,
            decision.window_s,
            decision.reason,
            before.variants,
        )

    # -- orders

    def _carry_out(self, changes: Collection[_Change], leaving: Collection[str], turn: Turn) -> list[Effect]:
        unserved = {name: self._choose(one) for name, one in self.deployed.items()}
        found = self.planner.reserve(self._reserved(), leaving, turn)
        for name, one in self.deployed.items():
            missing = unserved[name] | {vertex: why for vertex, (_, why) in self._short(one).items()}
            one.state = replace(one.state, epoch=turn.epoch, missing=missing)
        for change in changes:
            found += self._events(change, turn)
            if not self.plans:
                found += self._release(change, turn)
        return [*found, *self._save(turn)]

    def _choose(self, one: DeployedPipeline) -> dict[str, str]:
        """Note what serves each vertex; returns why nothing does, by vertex. A vertex that is a pipeline has instances of its own."""
        app = self.catalog.app(one.state.pipeline)
        variants: dict[str, str] = {}
        unserved: dict[str, str] = {}
        for vertex in app.pipeline.vertices if app is not None and app.pipeline is not None else ():
            stage, asked = one.plan.vertices.get(vertex.name), self.catalog.app(vertex.app)
            if stage is None or (asked is not None and asked.pipeline is not None):
                continue
            variant = self._serving(vertex, stage)
            if variant:
                variants[vertex.name] = variant
            else:
                unserved[vertex.name] = f"{vertex.app} has no variant on {stage.hardware} that suffices"
        one.state = replace(one.state, variants=variants)
        if one.tuner is not None:
            served = (self.catalog.variant(variant) for variant in variants.values())
            loads = (load_seconds(record) for record in served if record is not None)
            one.tuner.lead_s = LOOK_S + max(loads, default=0.0)
        return unserved

    def _serving(self, vertex: PipelineVertex, stage: PlannedStage) -> str:
        """The planned variant, or if it is gone, or not accurate enough any more, the cheapest that suffices. Empty: there is none."""
        known = self.catalog.variant(stage.variant)
        if known is not None and self.catalog.seen(vertex.app, [known])[0].truth is None:
            return stage.variant
        able = [
            record
            for record in variants_for(vertex.app, None, None, None, self.catalog, vertex.accuracy or 0.0)
            if record.hardware == stage.hardware
        ]
        if known is not None and (not able or any(record.variant == known.variant for record in able)):
            return stage.variant
        best = min(able, key=lambda each: (self.problems.cost(each, stage.batch), each.variant), default=None)
        return best.variant if best is not None else ""

    def _reserved(self) -> dict[str, Reservation]:
        found: dict[str, Reservation] = {}
        for name, one in sorted(self.deployed.items()):
            for vertex, variant in one.state.variants.items():
                known = found.get(variant, Reservation(0, ()))
                pipelines = known.pipelines if name in known.pipelines else (*known.pipelines, name)
                found[variant] = Reservation(known.replicas + one.state.replicas[vertex], pipelines)
        return found

    def _short(self, one: DeployedPipeline) -> dict[str, tuple[int, str]]:
        """By vertex, how many of its replicas find no room, and why."""
        found = {}
        for vertex, variant in one.state.variants.items():
            count, why = self.planner.lacking.get(variant, (0, ""))
            if count:
                found[vertex] = min(count, one.state.replicas[vertex]), why
        return found

    def _events(self, change: _Change, turn: Turn) -> Iterable[Effect]:
        one = self.deployed.get(change.pipeline)
        missing = one.state.missing if one is not None else {}
        for vertex in sorted({*change.before, *change.after}):
            before, after = change.before.get(vertex, 0), change.after.get(vertex, 0)
            if before != after or change.action == "target":
                yield Record(
                    PipelineEvent(
                        time=turn.now,
                        pipeline=change.pipeline,
                        vertex=vertex,
                        action=change.action,
                        from_replicas=before,
                        to_replicas=after,
                        lambda_max=change.rate,
                        window_s=change.window,
                        reason="; ".join(filter(None, (change.reason, missing.get(vertex)))),
                    )
                )

    def _release(self, change: _Change, turn: Turn) -> list[Effect]:
        found: list[Effect] = []
        for vertex, variant in sorted(change.variants.items()):
            fewer = change.before.get(vertex, 0) - change.after.get(vertex, 0)
            found += self.planner.surplus(variant, fewer, turn) if fewer > 0 else []
        return found

    def _save(self, turn: Turn) -> list[Effect]:
        saves: list[SaveReplicas] = []
        for name, one in self.deployed.items():
            if one.saved != one.state:
                one.saved = state = one.state
                saves.append(SaveReplicas(pipeline=name, epoch=state.epoch, at=state.at, record=state))
        saves += [SaveReplicas(pipeline=name, epoch=turn.epoch, at=turn.now) for name in sorted(self._ended)]
        self._ended.clear()
        return [Do(("replicas", one.pipeline), one, STORE_S) for one in saves]

    # -- figures

    def families(self, *, leads: bool) -> Iterable[MetricFamily]:
        wanted = gauge(
            "infaas_pipeline_replicas", "Replicas that the leader keeps for a vertex of a deployed pipeline."
        )
        lacking = gauge(
            "infaas_pipeline_replicas_missing", "Replicas of a vertex that nothing can serve, or that find no room."
        )
        for name, one in sorted(self.deployed.items()) if leads else ():
            short = self._short(one)
            for vertex, count in sorted(one.state.replicas.items()):
                none = count if vertex in one.state.missing else 0
                wanted.add(count, pipeline=name, vertex=vertex)
                lacking.add(short[vertex][0] if vertex in short else none, pipeline=name, vertex=vertex)
        return wanted, lacking
