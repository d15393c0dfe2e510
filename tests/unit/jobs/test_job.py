"""One job's commands when results cross: what fails while the job's record is being written."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, ModelRecord, PipelineRecord, Signature, TensorSpec, VariantRecord
from bus.messages.jobs import Checkpoint, PartStored, Position, SubmitJob
from bus.messages.quality import VersionRelease
from bus.subjects import Subjects
from services.core.actor import Changed, Do, Done, Envelope, Synced
from services.core.catalog import Catalog, key_of
from services.core.settings import JobsSettings
from services.jobs.actor import Coordinator
from services.jobs.commands import Abandon, Assemble, Assembled, Broken, ChunkRange, Feed, WasRead
from services.jobs.policy import JobPolicy, batch_within, chunk_items, cost_per_item, eligible
from tests.support.data.events import catalog_of
from tests.support.simulated.fleet import PRICES, catalogue, variant

S = Subjects()
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[3])], outputs=[TensorSpec(name="y", datatype="FP32", shape=[])]
)


class Commands:
    """A coordinator and its commands under way, by kind."""

    def __init__(self) -> None:
        self.actor = Coordinator("c", S, JobsSettings(window=4, chunk_items=1), PRICES, lambda: "j")
        self.under_way: dict[str, Any] = {}
        for record in catalogue(variant(signature=SIGNATURE)):
            changed = replace(record, signature=SIGNATURE) if hasattr(record, "signature") else record
            self.tell(Changed(S.catalog_bucket, key_of(changed), encode(changed)))
        self.tell(Synced(S.catalog_bucket))
        self.tell(Synced(S.jobs_bucket))

    def tell(self, message: Any, subject: str = "", reply: str = "") -> None:
        for effect in self.actor.handle(Envelope(1.0, message, subject, reply)):
            if isinstance(effect, Do):
                self.under_way[effect.id[0]] = effect.command

    def done(self, what: str, result: Any) -> None:
        del self.under_way[what]
        self.tell(Done((what, "j"), result))


def chunks(*numbers: int) -> list[ChunkRange]:
    return [ChunkRange(number, number, 1, Position(number), Position(number + 1)) for number in numbers]


def test_a_job_whose_input_breaks_while_its_record_is_written_fails_once_and_keeps_its_outputs() -> None:
    commands = Commands()
    commands.tell(SubmitJob(input="file:///a.npy", output="file:///b.npy"), S.job("app"), "_INBOX.1")
    commands.done("accept", None)
    commands.done("read", WasRead(10, "stamp"))
    commands.done("keep", True)
    assert isinstance(commands.under_way["feed"], Feed)
    commands.done("feed", chunks(0, 1, 2, 3))
    commands.tell(PartStored(job="j", number=0))
    assert isinstance(commands.under_way["assemble"], Assemble)
    commands.done("assemble", Assembled(Checkpoint(chunks=1, items=1, bytes=1), 0.1, ["v"]))
    commands.tell(PartStored(job="j", number=1))  # there is room again
    commands.done("feed", Broken("input: the file was changed while the job ran"))
    assert isinstance(commands.under_way["abandon"], Abandon)
    commands.done("keep", True)
    commands.done("abandon", "file:///b.npy.partial")
    last = commands.under_way["keep"]
    assert last.record.status.state == "failed"
    assert "the first 1 outputs are in file:///b.npy.partial" in str(last.record.status.reason)
    commands.done("keep", True)
    assert commands.under_way == {}


SMALL = variant("small", accuracy=0.7, base_ms=1.0, per_item_ms=0.1, max_batch=64)
LARGE = variant("large", accuracy=0.9, base_ms=4.0, per_item_ms=4.0)
UNSURE = variant("unsure", accuracy=None, base_ms=50.0)
FAKE = variant("fake", accuracy=0.99, simulated=True, hardware="gpu")
OTHER = variant("other", model="n", accuracy=0.8)
EVERYTHING = (SMALL, LARGE, UNSURE, FAKE, OTHER)


def catalog(*records: VariantRecord) -> Catalog:
    return catalog_of(*catalogue(*(records or EVERYTHING)))


def policy(*records: VariantRecord, **settings: Any) -> JobPolicy:
    return JobPolicy(catalog(*records), Subjects(), PRICES, JobsSettings(**settings), simulated=False)


def job(accuracy: float) -> SubmitJob:
    return SubmitJob(input="file:///a.npy", output="file:///b.npy", accuracy=accuracy)


def names(**wanted: object) -> set[str]:
    asked = {"accuracy": None, "model": None, "variant": None} | wanted
    return {record.variant for record in eligible(catalog(), "app", **asked)}  # type: ignore[arg-type]


def test_chunks_are_batches_of_the_cheapest_eligible_variant() -> None:
    assert names() == {"small", "large", "unsure", "other"}  # simulated ones may answer with zeros
    assert names(accuracy=0.75) == {"large", "unsure", "other"}
    assert names(accuracy=0.75, model="n") == {"other"}
    assert names(variant="small") == {"small"}
    assert names(variant="small", accuracy=0.8) == set()
    assert names(variant="fake") == {"fake"}
    assert names(variant="nothing") == set()
    foreign = replace(SMALL, variant="foreign", version="2")
    [record] = [one for one in catalogue(foreign) if isinstance(one, ModelRecord)]
    for app, found in (("app", [foreign]), ("health", [])):  # another app's version means other classes
        made = replace(record, app=app, labels=["healthy", "sick"])
        known = catalog_of(*catalogue(SMALL), foreign, made)
        assert eligible(known, "app", accuracy=None, model=None, variant="foreign") == found
    two = VersionRelease(model="m", version="2", old_version="1", steps=[0.5], least=1.0, margin=0.005)
    new = (replace(SMALL, variant="new", version="2"), replace(made, app="app"))
    for release, now in ((two, "small"), (replace(two, state="promoted"), "new")):
        apps = [one for one in catalogue(SMALL) if isinstance(one, AppRecord)]
        links = {"m": "1" if release.active else "2"}
        known = catalog_of(*catalogue(SMALL), *new, replace(apps[0], links=links, release=release))
        assert [one.variant for one in eligible(known, "app", accuracy=None, model="m", variant=None)] == [now]
    assert batch_within(LARGE, 64, 0.050) == 8  # 36 ms
    assert batch_within(LARGE, 64, 0.030) == 6
    assert batch_within(LARGE, 64, 0.001) == 1  # one item at least
    assert batch_within(LARGE, 4, 0.050) == 4
    assert chunk_items([SMALL, LARGE], PRICES, 64, 0.050) == batch_within(SMALL, 64, 0.050)
    assert chunk_items([], PRICES, 64, 0.050) == 1


@pytest.mark.parametrize(
    ("ask", "code", "says"),
    [
        ({"app": "nobody"}, "unknown_app", "no app 'nobody'"),
        ({"app": "no body"}, "bad_request", "app"),
        ({"model": "nothing"}, "unknown_model", "model: app has no model 'nothing', only m, n"),
        ({"variant": "nothing"}, "bad_request", "variant: app has no variant 'nothing'"),
        ({"variant": "small", "model": "n"}, "bad_request", "variant: "),
        ({"accuracy": 0.95, "model": "n"}, "unsatisfiable", "accuracy: no variant reaches 0.95, the most accurate one has 0.8"),
        ({"accuracy": -1.0}, "bad_request", "`accuracy`"),
        ({"input": "file:///a.csv"}, "bad_request", "input: "),
        ({"output": "gopher://x/a.npy"}, "bad_request", "output: "),
        ({"output": "file:///a.npy"}, "bad_request", "output: it is the input itself"),
        ({"job": "a b"}, "bad_request", "job"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused_by_field(ask: dict[str, object], code: str, says: str) -> None:
    fields = {"input": "file:///a.npy", "output": "file:///b.npy"} | ask
    app = str(fields.pop("app", "app"))
    error = policy().error(app, SubmitJob(**fields))  # type: ignore[arg-type]
    assert error.code == code
    assert says in error.message


def test_a_job_of_a_pipeline_is_refused_with_the_remedy() -> None:
    found = catalog()
    record = AppRecord(app="twice", links={}, pipeline=PipelineRecord(vertices=[]))
    found.apply(key_of(record), encode(record))
    error = JobPolicy(found, Subjects(), PRICES, JobsSettings(), simulated=False).error("twice", job(accuracy=0.1))
    assert error.code == "bad_request"
    assert (
        error.message == "app: twice is a pipeline: offline jobs run one model; submit them to the apps of its stages"
    )


def test_the_closest_is_named_and_larger_batches_cost_less() -> None:
    error = policy(LARGE, SMALL).error("app", job(accuracy=0.95))
    assert error.closest
    assert (error.closest.variant, error.closest.accuracy) == ("large", 0.9)
    assert policy(LARGE).error("app", job(accuracy=0.9)) is None
    assert cost_per_item(SMALL, 64, PRICES) < cost_per_item(SMALL, 8, PRICES) < cost_per_item(SMALL, 1, PRICES)
    assert cost_per_item(SMALL, 64, {}) == float("inf")


@pytest.mark.parametrize(
    ("settings", "items"),
    [
        ({"batch_ms": 50.0, "chunk_items": 64}, 8),  # 36 ms
        ({"batch_ms": 30.0, "chunk_items": 64}, 6),
        ({"batch_ms": 50.0, "chunk_items": 4}, 4),
    ],
)
def test_the_settings_bound_a_chunk(settings: dict[str, Any], items: int) -> None:
    assert policy(LARGE, **settings).record_of("app", job(accuracy=0.5), "j", "c", 1.0).chunk_items == items
