"""The trusted side of one order: fetches files, runs sandboxes, stores the artifacts, reports to the registrar. It opens no upload, but the
few bytes that name a remote engine: it alone talks to the engine.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
import stat
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import isfinite
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from bus.codec import encode
from bus.fields import filled
from bus.messages.work import (
    BuildVariants,
    CascadePlan,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkFinished,
    WorkProgress,
)
from bus.port import Bus, BusError, NotFound, ObjectStore
from bus.subjects import Subjects
from services.core.placement import REMOTE
from services.core.settings import RegistrarSettings
from services.executor.backends.base import LoadFailed
from services.executor.backends.remote import engine_file
from services.executor.backends.remote_http import HttpEngine, RemoteEngine, check_host, relay
from services.executor.workshop.actor import WorkshopOrder
from services.executor.workshop.sandbox import supervisor
from services.executor.workshop.sandbox.protocol import (
    Artifact,
    BuildTask,
    CascadePair,
    CascadeTask,
    Frame,
    Independence,
    Inspected,
    InspectTask,
    Joined,
    Made,
    Measured,
    MeasureTask,
    NotMade,
    Probed,
    ProbeTask,
    SandboxLimits,
    SandboxTask,
    Step,
    TaskRefused,
    UploadRejected,
    ValidationFile,
    profile_of,
)

F = TypeVar("F", Inspected, Measured, Probed)

REMIND_S = 10.0
CPU = "cpu"
MODEL, VALIDATION, REFERENCE, GOES_ON = "model", "validation.npz", "reference.npy", "goes-on.npy"
PARTS = ("first", "then")


@dataclass(eq=False)
class Helper:
    """One order of one worker. directory: empty; whoever started this removes it. forks: of which its sandboxes are copies. waiting: a sandbox that is
    started already.
    """

    bus: Bus
    subjects: Subjects
    limits: RegistrarSettings
    order: WorkshopOrder
    directory: Path
    forks: supervisor.TorchForks | None = None
    waiting: supervisor.NextSandbox | None = None

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.limits.seconds
        self._most_bytes = self.limits.max_model_mb * 2**20
        self._progress = WorkProgress(
            registration=self.order.registration, worker=self.order.worker, step="fetching the files", progress=0.0
        )
        self._share, self._base = 1.0, 0.0
        self._engine: RemoteEngine | None = None
        # A build is followed by measurements, and an inspection by a build, which is another process's unless it is given what waits.
        self._next = self.waiting or (
            supervisor.NextSandbox() if self.order.build is not None and self.forks is None else None
        )

    async def run(self) -> None:
        """Carry out the order. Its end is published whatever happens."""
        reminding = asyncio.ensure_future(self._remind())
        reason = None
        try:
            if self.order.inspect is not None:
                await self._inspect(self.order.inspect)
            elif self.order.build is not None:
                await self._build(self.order.build)
        except (UploadRejected, supervisor.SandboxCrashed) as error:
            reason = str(error)
        except NotFound as error:
            reason = f"a file of this registration is not in the object store: {error}"
        except BusError as error:
            reason = f"the object store failed: {error}"
        finally:
            reminding.cancel()
            if self._next is not None and (reason or self.order.build is not None):
                await self._next.close()
        self._publish(
            "finished",
            WorkFinished(
                registration=self.order.registration, worker=self.order.worker, order=self.order.kind, reason=reason
            ),
        )
        await self.bus.flush()

    # -- inspect

    async def _inspect(self, order: InspectModel) -> None:
        stored, uploads = self.subjects.artifacts_bucket, self.subjects.uploads_bucket
        models = await self.bus.object_store(stored if order.stored else uploads)
        sets = models if order.remeasures is None else await self.bus.object_store(uploads)
        await self._fetch(models, order.object, MODEL, "the model file", "object")
        await self._fetch(sets, order.validation, VALIDATION, "the validation set", "validation")
        source, validation = self._digest(MODEL), self._digest(VALIDATION)
        self._engine = self._remote_engine(order.format)
        task = filled(InspectTask, order, **self._about(order), scratch=self._scratch("inspect"))
        result = _last(Inspected, await self._sandbox(task))
        if not 0.0 <= result.accuracy <= 1.0:
            raise UploadRejected("the model's accuracy is not a number")
        frameworks = result.frameworks | await self._probe(order.hardware)
        if order.keep:
            artifacts = await self.bus.object_store(self.subjects.artifacts_bucket)
            await self._keep(artifacts, source, self.directory / MODEL)
            await self._keep(artifacts, validation, self.directory / VALIDATION)
        self._publish(
            "inspected",
            filled(
                ModelInspected,
                result,
                order,
                worker=self.order.worker,
                source=source,
                validation=validation,
                baseline_accuracy=result.accuracy,
                frameworks=frameworks,
            ),
        )

    async def _probe(self, hardware: str) -> dict[str, str]:
        """Which frameworks work on this worker's device of this kind. A sandbox without uploads tries them."""
        if hardware in (CPU, REMOTE):
            return {}
        task = ProbeTask(hardware=hardware, device=self._device(hardware), scratch=self._scratch("survey"))
        return _last(Probed, await self._sandbox(task, hardware=hardware)).frameworks

    def _device(self, hardware: str) -> str:
        """The address of this worker's device of this kind. Raises UploadRejected."""
        if hardware == CPU:
            return CPU
        try:
            return self.order.devices[hardware]
        except KeyError:
            raise UploadRejected(f"worker {self.order.worker} has no device of kind {hardware}") from None

    # -- build

    async def _build(self, order: BuildVariants) -> None:
        self._artifacts = await self.bus.object_store(self.subjects.artifacts_bucket)
        await self._fetch(self._artifacts, order.validation, VALIDATION, "the validation set", "validation")
        if order.cascades:
            await self._cascade(order)
            return
        await self._fetch(self._artifacts, order.source, MODEL, "the model file", "source")
        self._engine = self._remote_engine(order.format)
        plans: dict[Artifact, list[VariantPlan]] = defaultdict(list)
        for plan in order.plans:
            plans[self._artifact(plan)].append(plan)
        scores: dict[Artifact, tuple[Measured, str]] = {}
        every, start = list(plans), 0.0
        for some in filter(
            None, (every[:1], every[1:])
        ):  # the plainest is measured, and serves, before the others are made
            part, share = {artifact: plans[artifact] for artifact in some}, len(some) / len(every)
            self._base, self._share = start, 0.2 * share
            await self._make(order, part)
            groups = [(a, n) for a, ours in part.items() for n in sorted({plan.threads for plan in ours})]
            for done, (artifact, threads) in enumerate(groups):
                self._base = start + share * (0.2 + 0.8 * done / len(groups))
                self._share = 0.8 * share / len(groups)
                await self._profile(order, artifact, [p for p in part[artifact] if p.threads == threads], scores)
            start += share

    async def _cascade(self, order: BuildVariants) -> None:
        """Build the best cascade, if one is worth it."""
        parts = sorted({key for one in order.cascades for key in one.artifacts})
        paths = {key: f"part-{number}" for number, key in enumerate(parts)}
        for key, name in paths.items():
            await self._fetch(self._artifacts, key, name, "a variant's file", "cascades")
        artifact = self._artifact(order.cascades[0].plan)
        task = CascadeTask(
            data=self._data(order),
            scratch=self._scratch("build"),
            signature=order.signature,
            target=artifact.path,
            goes_on=f"{self._scratch('build')}/{GOES_ON}",
            pairs=[
                CascadePair(
                    **{name: str(self.directory / paths[key]) for name, key in zip(PARTS, one.artifacts, strict=True)},
                    first_cost=one.costs[0],
                    then_cost=one.costs[1],
                    most=one.most,
                )
                for one in order.cascades
            ],
        )
        joined = [frame for frame in await self._sandbox(task) if isinstance(frame, Joined)]
        if joined and 0 <= joined[-1].pair < len(task.pairs) and 0.0 < joined[-1].share < 1.0:
            best = order.cascades[joined[-1].pair]
            found = structs.replace(best.cascade, threshold=joined[-1].threshold, share=joined[-1].share)
            await self._profile(order, artifact, [best.plan], {}, structs.replace(best, cascade=found))

    async def _make(self, order: BuildVariants, plans: dict[Artifact, list[VariantPlan]]) -> None:
        """Make every artifact. One that cannot be made is reported and removed from `plans`. A crash fails one artifact."""
        left = list(plans)
        while left:
            task = filled(
                BuildTask,
                order,
                **self._about(order),
                scratch=self._scratch("build"),
                artifacts=left,
                reference=f"{self._scratch('build')}/{REFERENCE}",
                fixed_batch=all(plan.max_batch == 1 for plan in order.plans),
            )
            reason, frames = "", list[Frame]()
            try:
                await self._sandbox(task, frames)
            except supervisor.SandboxCrashed as crash:
                reason = str(crash)
                if not any(isinstance(f, Step) and f.step.startswith("building") for f in frames):
                    raise
            settled = {
                f.path: f.reason if isinstance(f, NotMade) else "" for f in frames if isinstance(f, Made | NotMade)
            }
            unsettled = [artifact for artifact in left if artifact.path not in settled]
            if unsettled:  # the first of them was being made when the sandbox ended
                settled[unsettled[0].path] = reason or "it ended without a result"
            for artifact in [artifact for artifact in left if settled.get(artifact.path)]:
                self._fail(plans.pop(artifact), settled[artifact.path])
            left = unsettled[1:]

    async def _profile(
        self,
        order: BuildVariants,
        artifact: Artifact,
        plans: list[VariantPlan],
        scores: dict[Artifact, tuple[Measured, str]],
        of: CascadePlan | None = None,
    ) -> None:
        """of: the cascade that it is, which is not built if it costs more than expected; else None."""
        task = filled(
            MeasureTask,
            order,
            artifact=artifact,
            data=self._data(order),
            scratch=self._scratch("build"),
            reference="" if of else f"{self._scratch('build')}/{REFERENCE}",
            goes_on=f"{self._scratch('build')}/{GOES_ON}" if of else "",
            threads=plans[0].threads,
            max_batches=sorted({plan.max_batch for plan in plans}),
            score=artifact not in scores,
            device=self.order.devices.get(plans[0].hardware, CPU),
        )
        try:
            self._device(plans[0].hardware)
            result, alone = await self._measure(task, plans[0].hardware)
            if task.score:
                scores[artifact] = result, alone
            scored, alone = scores[artifact]
            accuracy = _accuracy_of(scored)
            key = self._digest_of(Path(artifact.path))
            await self._keep(self._artifacts, key, Path(artifact.path))
            distribution = hashlib.sha256(scored.distribution).hexdigest() if scored.distribution else ""
            if distribution and not await self._artifacts.exists(distribution):
                await self._artifacts.put(distribution, scored.distribution)
        except (supervisor.SandboxCrashed, UploadRejected) as error:
            self._fail(plans, str(error))
            return
        for plan in plans:
            try:
                profile = profile_of(result, 1 if alone else plan.max_batch)
            except UploadRejected as error:
                self._fail([plan], str(error))
                continue
            if of is not None and (alone or plan.threads / profile.saturation_qps > of.most):
                return
            self._publish(
                "built",
                filled(
                    VariantBuilt,
                    scored,
                    plan,
                    order,
                    worker=self.order.worker,
                    plan=plan,
                    artifact=key,
                    accuracy=accuracy,
                    contexts=result.contexts,
                    profile=profile,
                    alone=alone,
                    distribution=distribution,
                    cascade=None if of is None else of.cascade,
                    functions=order.functions and structs.replace(order.functions, ms=result.functions_ms),
                ),
            )

    async def _measure(self, task: MeasureTask, hardware: str) -> tuple[Measured, str]:
        """What was measured, and why items must be computed alone. Raises SandboxCrashed, UploadRejected."""
        frames: list[Frame] = []
        try:
            await self._sandbox(task, frames, hardware=hardware)
        except supervisor.SandboxCrashed as crash:
            if not any(isinstance(frame, Measured) for frame in frames):
                raise
            return _last(Measured, frames), f"in a batch with an extreme item it crashed: {crash}"[:300]
        found = [frame for frame in frames if isinstance(frame, Independence)]
        return _last(Measured, frames), found[-1].alone[:300] if found else ""

    def _fail(self, plans: list[VariantPlan], reason: str) -> None:
        for plan in plans:
            self._publish(
                "variant-failed",
                VariantFailed(registration=self.order.registration, worker=self.order.worker, plan=plan, reason=reason),
            )

    # -- the sandbox

    async def _sandbox(self, task: SandboxTask, frames: list[Frame] | None = None, hardware: str = CPU) -> list[Frame]:
        """Run one task and return its frames. Raises UploadRejected if the sandbox refused it, SandboxCrashed if it crashed.

        hardware: whose devices it may open.
        """
        frames = [] if frames is None else frames
        left = self._until - time.monotonic()
        if left <= 0:
            raise supervisor.SandboxCrashed(
                f"it took longer than the {self.limits.seconds:g} s allowed (registrar.seconds); a smaller validation set takes less"
            )
        limits = SandboxLimits(
            memory_bytes=self.limits.memory_mb * 2**20,
            seconds=left,
            file_bytes=2 * self._most_bytes + 64 * 2**20,
            hardware=hardware,
        )

        def on_frame(frame: Frame) -> None:
            frames.append(frame)
            if isinstance(frame, Step):
                share = min(1.0, max(0.0, frame.progress)) if isfinite(frame.progress) else 0.0
                self._report(frame.step, share)

        async with _relayed(self._engine) as relay:
            forks = self.forks if hardware == CPU else None
            await supervisor.run(task, limits, on_frame, relay, forks, self._next)
        refused = [frame for frame in frames if isinstance(frame, TaskRefused)]
        if refused:
            raise UploadRejected(refused[-1].reason[:600])
        return frames

    def _remote_engine(self, format: str) -> RemoteEngine | None:
        """The engine that the fetched file names, if it is such a file and its host is allowed. Raises UploadRejected."""
        if format != REMOTE:
            return None
        try:
            url = engine_file(self.directory / MODEL)
            check_host(url, self._device(REMOTE))
        except LoadFailed as error:
            raise UploadRejected(str(error)) from error
        return HttpEngine(url)

    def _about(self, order: InspectModel | BuildVariants) -> dict[str, Any]:
        """What tasks on the model's file hear of it besides what the order says."""
        return {
            "model": str(self.directory / MODEL),
            "data": self._data(order),
            "most_bytes": self._most_bytes,
            "allow_torchscript": order.allow_torchscript and self.limits.allow_torchscript,
        }

    def _data(self, order: InspectModel | BuildVariants) -> ValidationFile:
        most = self.limits.memory_mb * 2**20 // 4
        named = order.functions is not None and bool(order.functions.after)
        return filled(ValidationFile, order, path=str(self.directory / VALIDATION), most_bytes=most, named=named)

    def _artifact(self, plan: VariantPlan) -> Artifact:
        name = "".join(c if c.isalnum() else "-" for c in f"{plan.framework}-{plan.precision}-{plan.format}")
        path = f"{self._scratch('build')}/{name}.{'pt2' if plan.format == 'pt2' else 'model'}"
        return Artifact(framework=plan.framework, precision=plan.precision, format=plan.format, path=path)

    def _scratch(self, name: str) -> str:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return str(path)

    # -- files

    async def _fetch(self, store: ObjectStore, key: str, name: str, what: str, field: str) -> None:
        path = self.directory / name
        try:
            await store.get_to(key, path)
        except NotFound:
            raise UploadRejected(f"{what} is not in the object store: upload it first (field `{field}`)") from None
        if path.stat().st_size > self._most_bytes:
            raise UploadRejected(
                f"{what} is larger than the {self.limits.max_model_mb} MB allowed (registrar.max_model_mb)"
            )
        path.chmod(0o444)

    def _digest(self, name: str) -> str:
        return self._digest_of(self.directory / name)

    def _digest_of(self, path: Path) -> str:
        """SHA-256 of a plain file. A sandbox may have left anything at this path."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise UploadRejected("the sandbox left something that is not a plain file")
            return hashlib.file_digest(file, "sha256").hexdigest()

    async def _keep(self, store: ObjectStore, key: str, path: Path) -> None:
        if not await store.exists(key):
            await store.put(key, path)

    # -- publishing

    def _publish(self, fact: str, message: Struct) -> None:
        self.bus.publish(self.subjects.registrar(fact), encode(message))

    def _report(self, step: str, share: float) -> None:
        self._progress = structs.replace(self._progress, step=step[:200], progress=self._base + self._share * share)
        self._publish("progress", self._progress)

    async def _remind(self) -> None:
        """Repeat the last progress: the registrar gives up a silent worker."""
        while True:
            self._publish("progress", self._progress)
            await asyncio.sleep(REMIND_S)


@contextlib.asynccontextmanager
async def _relayed(engine: RemoteEngine | None) -> AsyncIterator[int | None]:
    """A descriptor for a sandbox, through which it asks for requests to the engine. None if there is no engine."""
    if engine is None:
        yield None
        return
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as connection:
        serving = asyncio.ensure_future(asyncio.to_thread(relay, connection, engine))
        try:
            with theirs:
                yield theirs.fileno()
        finally:
            engine.cancel()  # the sandbox has ended
            await serving
            engine.close()


def _last(kind: type[F], frames: list[Frame]) -> F:
    """The newest frame of this kind. Raises SandboxCrashed if there is none."""
    for frame in reversed(frames):
        if isinstance(frame, kind):
            return frame
    raise supervisor.SandboxCrashed("the sandbox ended without a result")


def _accuracy_of(measured: Measured) -> float:
    """Raises SandboxCrashed if it is not there."""
    if measured.accuracy is None:
        raise supervisor.SandboxCrashed("the sandbox ended without an accuracy")
    return measured.accuracy
