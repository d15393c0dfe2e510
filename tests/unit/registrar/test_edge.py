"""The registrar's edge on the bus within one process: claims, take-overs, and records that several hands write at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.memory import Broker
from bus.messages.catalog import (
    AppRecord,
    BatchingRule,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    Signature,
)
from bus.messages.public import Error, RegistrationStatus
from bus.messages.verbs import (
    AddApp,
    DeleteApp,
    DeleteVersion,
    PipelineHead,
    Prune,
    ReleaseVariant,
    ResetSelection,
    SetBatching,
    SetPipeline,
    SetReplicas,
    SetSelection,
    UnlinkModel,
)
from bus.port import KeyValue, ObjectStore
from bus.subjects import Subjects
from services.core.batching import batching_key
from services.core.catalog import counted_key, selection_key
from services.core.placement import quarantine_key, quarantined_at
from services.core.requests import TakeOver
from services.core.settings import QualitySettings
from services.registrar.commands import (
    AlreadyTaken,
    ClaimRegistration,
    ContextsDeleted,
    Finish,
    LinkVersion,
    MarkCancelled,
    Pruned,
    PutRecords,
    PutStatus,
    RegistrationClaimed,
    RegistrationRecord,
    error_of,
)
from services.registrar.edge import RegistrarEdge
from tests.support.simulated.registrations import REQUEST, SIGNATURE, deploying, model_record, variant_record

SUBJECTS = Subjects("t")
LINK = LinkVersion(app="digits", record=model_record(app="digits"), create=True)


ONE_STAGE = PipelineRecord(
    vertices=[PipelineVertex(name="only", app="digits", inputs={"x": "$.x"})], output={"scores": "only.scores"}
)
PLAN = PipelinePlan(
    pipeline="twice",
    policy="inferline",
    status="feasible",
    cost_per_s=0.001,
    p99_ms=50.0,
    vertices={"only": PlannedStage(hardware="cpu", batch=1, replicas=1, scale=1.0, service_ms=1.0, rho=0.5)},
    envelope=[(1.0, 20)],
    dispersion=[1.0],
    steps=[],
    rate=10.0,
    latency_ms=100.0,
)


class Place:
    """A bus with an edge, and the buckets it writes."""

    edge: RegistrarEdge
    catalog: KeyValue
    status: KeyValue
    uploads: ObjectStore
    artifacts: ObjectStore
    control: KeyValue
    contexts: KeyValue
    payloads: KeyValue

    async def do(self, command: Any) -> Any:
        return await self.edge.perform(command)

    async def keys(self) -> set[str]:
        return {*await self.catalog.keys(), *await self.status.keys(), *await self.uploads.keys()}


@asynccontextmanager
async def on_a_bus() -> AsyncIterator[Place]:
    bus = Broker().connect()
    place = Place()
    place.edge = await RegistrarEdge.open(bus, SUBJECTS, QualitySettings())
    place.catalog = await bus.key_value(SUBJECTS.catalog_bucket)
    place.status = await bus.key_value(SUBJECTS.status_bucket)
    place.control = await bus.key_value(SUBJECTS.control_bucket)
    place.contexts = await bus.key_value(SUBJECTS.selection_bucket)
    place.payloads = await bus.key_value(SUBJECTS.payloads_bucket)
    place.uploads = await bus.object_store(SUBJECTS.uploads_bucket)
    place.artifacts = await bus.object_store(SUBJECTS.artifacts_bucket)
    try:
        yield place
    finally:
        await bus.close()


@pytest.fixture
def place() -> AbstractAsyncContextManager[Place]:
    return on_a_bus()


def work(registration: str = "r1", registrar: str = "a", **request: Any) -> RegistrationRecord:
    asked = replace(REQUEST, registration=registration, **request)
    return RegistrationRecord(registration=registration, request=asked, registrar=registrar, created=5.0)


async def test_a_claim_gets_the_next_free_version_and_may_be_repeated(place: Place) -> None:
    first = await place.do(ClaimRegistration(record=work(), next_version=3))
    assert first == RegistrationClaimed(replace(work(), version="3"))
    assert await place.do(ClaimRegistration(record=work(), next_version=3)) == first
    assert await place.do(ClaimRegistration(record=work("r2"), next_version=3)) == RegistrationClaimed(
        replace(work("r2"), version="4")
    )
    assert decode(RegistrationRecord, (await place.status.get("work.r1")).value or b"").version == "3"


async def test_ids_and_versions_are_claimed_once(place: Place) -> None:
    await place.do(ClaimRegistration(record=work(version="1"), next_version=1))
    assert await place.do(ClaimRegistration(record=work(registrar="b"), next_version=1)) == AlreadyTaken("registration")
    assert await place.do(ClaimRegistration(record=work("r2", version="1"), next_version=1)) == AlreadyTaken("version")
    await place.catalog.put("model.mlp.2", encode(model_record(version="2")))
    assert await place.do(ClaimRegistration(record=work("r3", version="2"), next_version=1)) == AlreadyTaken("version")
    assert (await place.do(ClaimRegistration(record=work("r4"), next_version=1))).record.version == "3"
    assert await place.keys() == {"work.r1", "version.mlp.1", "model.mlp.2", "work.r4", "version.mlp.3"}


async def test_many_at_once_get_different_versions_and_lose_no_link(place: Place) -> None:
    claims = [place.do(ClaimRegistration(record=work(f"r{n}"), next_version=1)) for n in range(20)]
    versions = [claimed.record.version for claimed in await asyncio.gather(*claims)]
    assert sorted(versions, key=int) == [str(n) for n in range(1, 21)]
    changes = [replace(LINK, record=model_record(f"m{n}")) for n in range(20)]
    assert await asyncio.gather(*map(place.do, changes)) == [None] * 20
    app = decode(AppRecord, (await place.catalog.get("app.digits")).value or b"")
    assert set(app.links) == {f"m{n}" for n in range(20)}


async def test_only_one_takes_over(place: Place) -> None:
    await place.do(ClaimRegistration(record=work(), next_version=1))
    commands = [TakeOver(work="r1", owner=name, previous="a") for name in ("b", "c", "d")]
    taken = [found for found in await asyncio.gather(*map(place.do, commands)) if found is not None]
    assert len(taken) == 1
    assert taken[0].version == "1"
    assert decode(RegistrationRecord, (await place.status.get("work.r1")).value or b"") == taken[0]
    assert await place.do(TakeOver(work="nobody", owner="b", previous="a")) is None


async def test_a_registration_is_marked_as_cancelled_whoever_has_it(place: Place) -> None:
    await place.do(ClaimRegistration(record=work(), next_version=1))
    mark = place.do(MarkCancelled("r1"))
    take = place.do(TakeOver(work="r1", owner="b", previous="a"))
    await asyncio.gather(mark, take)
    kept = decode(RegistrationRecord, (await place.status.get("work.r1")).value or b"")
    assert (kept.cancelled, kept.version) == (True, "1")
    assert "r2 is not under way" in (await place.do(MarkCancelled("r2"))).message


async def test_records_are_written_variants_first_and_app_last(place: Place) -> None:
    seen: list[str] = []
    watch = await place.catalog.watch(lambda entry: seen.append(entry.key) if entry else None)
    records = PutRecords(variants=(variant_record("v1"), variant_record("v2")), model=model_record(), link=LINK)
    assert await place.do(records) is None
    for _ in range(100):
        if len(seen) == 4:
            break
        await asyncio.sleep(0.01)
    await watch.drain()
    assert seen == ["variant.v1", "variant.v2", "model.mlp.1", "app.digits"]
    assert await place.do(records) is None, "it may be repeated"
    app = decode(AppRecord, (await place.catalog.get("app.digits")).value or b"")
    assert app.links == {"mlp": "1"}


async def test_records_that_are_not_allowed_leave_nothing_behind(place: Place) -> None:
    other = Signature(inputs=SIGNATURE.outputs, outputs=SIGNATURE.inputs)
    await place.do(replace(LINK, record=model_record("first", signature=other)))
    refused = await place.do(PutRecords(variants=(variant_record("v1"),), model=model_record(), link=LINK))
    assert "signature" in refused.message
    assert await place.keys() == {"app.digits"}
    await place.catalog.put("model.mlp.1", encode(model_record(registration="somebody else's")))
    taken = await place.do(PutRecords(variants=(), model=model_record(), link=None))
    assert taken.message.startswith("version: ")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("nosuch:Thing", "policy: nosuch:Thing cannot be loaded: there is no module nosuch; put"),
        ("collections:Nothing", "collections has no Nothing"),
        ("collections:Counter", "it has no method `init`"),
        ("tests.unit.registrar.own_policy:Ends", "its process ended with code 3 in its import"),
        ("tests.unit.registrar.own_policy:Whole", ""),
        ("exp4", ""),
    ],
)
async def test_a_class_that_cannot_be_loaded_is_refused(place: Place, policy: str, words: str) -> None:
    await place.do(LINK)
    done = await place.do(SetSelection(app="digits", policy=policy))
    app = decode(AppRecord, (await place.catalog.get("app.digits")).value or b"")
    assert (app.selection is not None) == (not words)
    assert done is None if not words else isinstance(done, Error) and words in done.message


async def test_a_version_with_other_classes_than_the_models_that_an_app_serves_is_not_linked(place: Place) -> None:
    await place.do(PutRecords(variants=(), model=model_record(app="digits", labels=["no", "yes"]), link=LINK))
    change = replace(LINK, record=model_record("other", app="shapes", labels=["round", "square"]))
    refused = await place.do(change)
    assert "was registered for app shapes and does not fit app digits" in refused.message


async def test_operators_changes_and_keys_of_quarantines(place: Place) -> None:
    assert await place.do(AddApp(app="a")) is None
    assert isinstance(await place.do(AddApp(app="a")), Error)
    assert await place.do(DeleteApp(app="a")) == ContextsDeleted("a")
    assert isinstance(await place.do(DeleteApp(app="a")), Error)
    assert await place.do(AddApp(app="a")) is None, "a deleted app can be made again"
    assert quarantined_at(quarantine_key("w-1", "m-v1-ort")) == ("w-1", "m-v1-ort")
    assert quarantined_at("controller") is None
    assert quarantined_at("quarantine.w1") is None


async def test_the_replicas_of_a_model_are_kept_by_each_app_that_links_it(place: Place) -> None:
    for app in ("a", "b"):
        await place.do(replace(LINK, app=app))
    assert await place.do(SetReplicas(model="mlp", count=4)) is None
    for app in ("a", "b"):
        kept = decode(AppRecord, (await place.catalog.get(f"app.{app}")).value or b"")
        assert kept.replicas == {"mlp": 4}
    assert isinstance(await place.do(SetReplicas(app="none", model="mlp", count=1)), Error)


async def test_an_end_clears_everything_away_and_may_be_repeated(place: Place) -> None:
    for key in ("r1.model", "r1.validation", "other.model"):
        await place.uploads.put(key, b"x")
    await place.do(ClaimRegistration(record=work(), next_version=1))
    status = RegistrationStatus(registration="r1", state="done", app="digits", model="mlp")
    await place.do(PutStatus("r1", status))
    end = Finish(registration="r1", model="mlp", version="1", uploads=("r1.model", "r1.validation"))
    for _ in range(2):
        await place.do(end)
        assert await place.keys() == {"registration.r1", "other.model"}
    assert decode(RegistrationStatus, (await place.status.get("registration.r1")).value or b"") == status
    await place.do(replace(end, forget=True))
    assert await place.keys() == {"other.model"}, "of a dry run nothing is left"


async def test_a_version_that_another_registration_has_reserved_since_stays_reserved(place: Place) -> None:
    await place.do(ClaimRegistration(record=work("r2"), next_version=1))
    await place.do(Finish(registration="r1", model="mlp", version="1", uploads=()))
    assert (await place.status.get("version.mlp.1")).value == b"r2"


async def test_a_release_ends_a_variants_quarantine_everywhere_or_on_one_worker(place: Place) -> None:
    for worker in ("w1", "w2", "w3"):
        await place.control.put(quarantine_key(worker, "v"), b"no such operator")
    await place.control.put(quarantine_key("w1", "other"), b"why")
    await place.control.put("controller", b"x")
    assert await place.do(ReleaseVariant(variant="v", worker="w2")) is None
    assert set(await place.control.keys()) == {
        quarantine_key("w1", "v"),
        quarantine_key("w3", "v"),
        quarantine_key("w1", "other"),
        "controller",
    }
    assert await place.do(ReleaseVariant(variant="v")) is None
    assert set(await place.control.keys()) == {quarantine_key("w1", "other"), "controller"}
    again = await place.do(ReleaseVariant(variant="v"))
    assert again == error_of("variant: v is not quarantined on any worker")


async def test_a_rule_of_batching_is_kept_until_it_is_removed_or_its_app_deleted(place: Place) -> None:
    rule = BatchingRule(policy="fixed", batch=3)
    await place.do(AddApp(app="a"))
    for scope in ("app", "model", "variant"):
        named: dict[str, Any] = {scope: "a"}
        assert await place.do(SetBatching(**named, policy="fixed", batch=3)) is None
    kept = await place.control.get(batching_key("model", "a"))
    assert decode(BatchingRule, kept.value or b"") == rule
    for _ in range(2):
        assert await place.do(SetBatching(model="a")) is None
    await place.do(DeleteApp(app="a"))
    assert await place.control.keys() == [batching_key("variant", "a")]


async def test_a_version_goes_with_its_variants_once_no_app_serves_it_and_its_number_is_not_given_out_again(
    place: Place,
) -> None:
    first = PutRecords(variants=(variant_record(),), model=model_record(), link=LINK)
    other = replace(variant_record("mlp-v2"), version="2")
    second = PutRecords(variants=(other,), model=model_record(version="2"), link=None)
    for records in (first, second):
        assert await place.do(records) is None
    kept = await place.do(DeleteVersion(model="mlp", version="1"))
    assert "app digits serves version 1 of model mlp" in kept.message
    for name in (variant_record().variant, other.variant):
        await place.control.put(quarantine_key("gone", name), b"why")
        await place.do(SetBatching(variant=name, policy="fixed", batch=3))
    assert isinstance(await place.do(DeleteVersion(model="mlp", version="2")), Pruned)
    assert await place.keys() == {
        "app.digits",
        "model.mlp.1",
        f"variant.{variant_record().variant}",
        "version.mlp.2",
    }
    kept_of = variant_record().variant
    assert {*await place.control.keys()} == {quarantine_key("gone", kept_of), batching_key("variant", kept_of)}
    assert isinstance(await place.do(DeleteVersion(model="mlp", version="2")), Pruned)
    assert await place.do(ClaimRegistration(record=work("r2", version="2"), next_version=2)) == AlreadyTaken("version")
    claimed = await place.do(ClaimRegistration(record=work("r3"), next_version=2))
    assert claimed.record.version == "3"


async def test_files_go_with_the_last_version_that_has_them_and_not_while_a_registration_may_need_them(
    place: Place,
) -> None:
    files = {"source": "5" * 64, "validation": "7" * 64}
    for version in ("1", "2"):
        variant = replace(
            variant_record(f"mlp-v{version}"), version=version, artifact=version * 64, distribution="8" * 64
        )
        model = replace(model_record(version=version), **files)
        assert await place.do(PutRecords(variants=(variant,), model=model, link=None)) is None
    there = [*files.values(), "1" * 64, "2" * 64, "8" * 64, "9" * 64]
    for key in there:
        await place.artifacts.put(key, b"x" * 2**20)
    said = await place.do(Prune(dry_run=True))
    assert said == Pruned("1 files, 1.0 MB would be deleted")
    await place.do(ClaimRegistration(record=work("r9", version="9"), next_version=9))
    assert (await place.do(DeleteVersion(model="mlp", version="2"))).kept is None
    assert sorted(await place.artifacts.keys()) == sorted(there)
    ended = await place.do(Finish(registration="r9", model="mlp", version="9", uploads=()))
    kept = sorted([*files.values(), "1" * 64, "8" * 64])
    assert (ended.note, ended.kept.artifacts) == ("2 files, 2.0 MB were deleted", kept)
    assert sorted(await place.artifacts.keys()) == kept
    await place.do(DeleteVersion(model="mlp", version="1"))
    assert await place.artifacts.keys() == []
    await place.artifacts.put("9" * 64, b"x")
    await place.catalog.put("variant.strange", b"of another release")
    assert "cannot read" in (await place.do(Prune())).note
    assert await place.artifacts.keys() == ["9" * 64]


async def test_a_cancelled_registration_takes_back_what_it_has_written_unless_it_is_in_use(place: Place) -> None:
    put = PutRecords(variants=(variant_record(),), model=model_record(), link=LINK)
    end = Finish(registration=model_record().registration, model="mlp", version="1", uploads=(), withdraw=True)
    assert await place.do(put) is None
    await place.do(replace(end, withdraw=False))
    assert "app.digits" in await place.keys()
    await place.do(end)
    await place.do(end)
    assert await place.keys() == {"version.mlp.1"}, "the app was made for it; its number is not given out again"
    other = model_record("first", registration="r0")
    await place.do(replace(LINK, record=other))
    assert await place.do(put) is None
    await place.do(end)
    assert decode(AppRecord, (await place.catalog.get("app.digits")).value or b"").links == {"first": "1"}
    assert await place.do(put) is None
    head = PipelineHead(name="twice", latency_ms=100.0)
    await place.do(UnlinkModel(app="digits", model="first"))
    await place.do(SetPipeline(pipeline=head, vertices=ONE_STAGE.vertices, output=ONE_STAGE.output))
    await place.do(end)
    assert {"app.digits", "model.mlp.1"} < await place.keys(), "a pipeline uses it"


async def _learnt(place: Place) -> None:
    for app in ("digits", "digits-2"):
        for context in (None, "me", "you"):
            await place.contexts.create(selection_key(app, context), b"learnt")


async def test_a_reset_forgets_one_context(place: Place) -> None:
    await _learnt(place)
    key = selection_key("digits", "me")
    await place.contexts.create(counted_key(key), b"marks")
    assert await place.do(ResetSelection(app="digits", context="me")) == ContextsDeleted("digits", key)
    assert not {key, counted_key(key)} & set(await place.contexts.keys())
    assert len(await place.contexts.keys()) == 5
    assert await place.do(ResetSelection(app="digits", context="nobody")) == ContextsDeleted(
        "digits", selection_key("digits", "nobody")
    )


async def test_a_reset_forgets_all_of_an_app_and_of_no_other(place: Place) -> None:
    await _learnt(place)
    assert await place.do(ResetSelection(app="digits")) == ContextsDeleted("digits")
    assert sorted(await place.contexts.keys()) == sorted(selection_key("digits-2", c) for c in (None, "me", "you"))


async def test_what_a_deleted_app_has_learnt_goes_with_it(place: Place) -> None:
    await _learnt(place)
    await place.do(AddApp(app="digits"))
    for app in ("digits", "digits2"):
        await place.payloads.put(f"{app}.query._.query", b"with its answer")
    assert await place.do(DeleteApp(app="digits")) == ContextsDeleted("digits")
    assert await place.payloads.keys() == ["digits2.query._.query"]
    assert len(await place.contexts.keys("digits")) == 0
    assert len(await place.contexts.keys("digits-2")) == 3


async def test_pipelines_see_what_the_bucket_holds_and_plans_follow_the_version_that_serves(place: Place) -> None:
    for version in ("1", "2"):
        model = model_record(version=version, registration=version)
        variant = variant_record(f"mlp-{version}", version=version)
        link = replace(LINK, record=model) if version == "1" else None
        assert await place.do(PutRecords(variants=(variant,), model=model, link=link)) is None
    head = PipelineHead(name="twice", latency_ms=100.0)
    pipeline = SetPipeline(pipeline=head, vertices=ONE_STAGE.vertices, output=ONE_STAGE.output)
    assert (await place.do(pipeline)) is None, "the app was linked just before"
    assert await place.do(deploying(PLAN, "twice")) is None
    assert (await planned(place, "twice")).vertices["only"].variant == "mlp-1"
    refused = await place.do(DeleteApp(app="digits"))
    assert "app: digits is a stage of pipeline twice" in refused.message
    assert await place.do(replace(LINK, record=model_record(version="2"))) is None
    assert (await planned(place, "twice")).vertices["only"].variant == "mlp-2"
    elsewhere = variant_record("other-gpu", model="other", hardware="gpu")
    other = replace(LINK, record=model_record("other"))
    put = PutRecords(variants=(elsewhere,), model=model_record("other", registration="3"), link=other)
    assert await place.do(put) is None
    told = await place.do(UnlinkModel(app="digits", model="mlp"))
    assert told.note.startswith("the plan of pipeline twice has ended: plan.vertices.only.hardware: app digits has no")
    record = decode(AppRecord, (await place.catalog.get("app.twice")).value or b"")
    assert (record.plan, record.plan_ended.partition(":")[0]) == (None, "plan.vertices.only.hardware")
    assert await place.do(DeleteApp(app="twice")) == ContextsDeleted("twice")
    assert await place.do(DeleteApp(app="digits")) == ContextsDeleted("digits")


async def planned(place: Place, app: str) -> PipelinePlan:
    plan = decode(AppRecord, (await place.catalog.get(f"app.{app}")).value or b"").plan
    assert plan is not None
    return plan
