"""One job's commands when results cross: what fails while the job's record is being written."""

from typing import Any

from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.jobs import Checkpoint, PartStored, Position, SubmitJob
from bus.subjects import Subjects
from services.core.actor import Changed, Do, Done, Envelope, Synced
from services.core.catalog import key_of
from services.core.settings import JobsSettings
from services.jobs.actor import Coordinator
from services.jobs.commands import Abandon, Assemble, Assembled, Broken, ChunkRange, Feed, WasRead
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
