"""The executor's models come and go: on the device, in host memory, nowhere; queries wait meanwhile, and none is lost."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.fleet import (
    DemoteInstance,
    ExecutorReport,
    HeldInstances,
    InstanceFailed,
    InstanceLoaded,
    InstanceUnloaded,
    LoadInstance,
    MoveInstance,
    SucceedExecutor,
    Tier,
    UnloadInstance,
)
from bus.messages.flow import Execute, HandBack, Route
from bus.messages.public import Answer, Refusal, Tensor
from bus.subjects import Subjects
from services.core.actor import After, Do, Done, Effect, Envelope, Failed, Publish, Started
from services.core.placement import Device
from services.core.settings import Settings
from services.executor.__main__ import ExecutorInsight
from services.executor.actor import BatchesDue, Executor, make_executor
from services.executor.commands import (
    BatchResult,
    LoadedModel,
    LoadModel,
    MovedModel,
    RunBatch,
    TransferModel,
    UnloadModel,
)
from services.executor.instances import ReportDue
from services.executor.loading import fits_twice
from tests.support.simulated.fleet import variant

GPU = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=1000.0)
RECORD = replace(variant(), hardware="gpu")
NOW = 1000.0
INPUTS = Raw(encode({"inputs": Tensor("FP32", [1, 2], bytes(8))}))
OUTPUTS = {"y": Tensor("FP32", [1, 1], bytes(4))}
LOAD, PRELOAD = (LoadInstance(instance="i", variant=RECORD, tier=tier) for tier in ("device", "host"))
DEMOTE, UNLOAD = DemoteInstance(instance="i"), UnloadInstance(instance="i")


class OneGpu:
    """An executor; what its edge is to do waits in `work` until the test ends it."""

    def __init__(self) -> None:
        self.actor = make_executor(Settings(), Subjects(), "w", GPU, 1)
        self.work: list[Do] = []
        self.said: list[Any] = []
        self.sent = 0

    def tell(self, message: Any) -> list[Any]:
        """What it publishes in turn."""
        effects: list[Effect] = list(self.actor.handle(Envelope(NOW, message)))
        self.work += [e for e in effects if isinstance(e, Do)]
        said = [e.message for e in effects if isinstance(e, Publish)]
        self.said += said
        return said

    def ask(self) -> list[Any]:
        uid = self.sent.to_bytes(16, "big")
        self.sent += 1
        route = Route(uid, 0, 0, "inbox", NOW + 500, NOW, "d", "i", "app", 1, str(self.sent))
        return self.tell(Execute(route, INPUTS))

    def batches(self) -> list[Any]:
        return self.tell(BatchesDue())

    def end(self, number: int = 0, *, fails: bool = False) -> list[Any]:
        """The edge has done what waited longest."""
        do = self.work.pop(number)
        command = do.command
        if fails:
            return self.tell(Failed(do.id, "no"))
        match command:
            case RunBatch():
                return self.tell(Done(do.id, BatchResult(NOW, NOW, [OUTPUTS] * len(command.queries))))
            case LoadModel() | TransferModel():
                return self.tell(
                    Done(do.id, LoadedModel(5.0, 50.0, "here", tier=command.tier, copied=self.copied(command)))
                )
        return self.tell(Done(do.id, None))

    def copied(self, command: LoadModel | TransferModel) -> bool:
        return isinstance(command, TransferModel) and command.tier == "device" and command.copied

    def finish(self) -> None:
        while self.work or self.actor.pending:
            before = len(self.work)
            self.batches()
            if not self.work:
                assert len(self.work) > before, "queries wait, and nothing is under way"
            self.end()

    @property
    def under_way(self) -> list[Any]:
        return [type(do.command) for do in self.work]

    @property
    def tier(self) -> Tier | None:
        """As its report tells the monitor; None: it has no instance."""
        [report] = [one for one in self.tell(ReportDue()) if isinstance(one, ExecutorReport)]
        self.work.pop()  # measures memory
        return report.samples[0].tier if report.samples else None


def loaded_to(tier: Tier, *, copied: bool = False) -> list[Any]:
    return [
        InstanceLoaded(
            instance="i", variant=RECORD.variant, device="gpu-0", incarnation=1, load_ms=5.0, memory_mb=50.0,
            proof="here", tier=tier, copied=copied,
        )
    ]  # fmt: skip


def on_device() -> OneGpu:
    gpu = OneGpu()
    gpu.tell(LOAD)
    assert gpu.end() == loaded_to("device")
    return gpu


def test_a_demoted_model_leaves_once_its_queue_is_empty_and_is_warm() -> None:
    gpu = on_device()
    gpu.ask()
    gpu.tell(DEMOTE)
    assert gpu.under_way == []
    assert [type(one) for one in gpu.ask()] == [HandBack]
    gpu.batches()
    assert gpu.under_way == [RunBatch]
    gpu.end()
    assert (gpu.under_way, gpu.tier) == ([TransferModel], "device")
    assert gpu.end() == loaded_to("host")
    assert gpu.tier == "host"
    assert [type(one) for one in gpu.ask()] == [HandBack]


def test_a_load_of_a_warm_model_is_a_transfer_for_which_queries_wait() -> None:
    gpu = on_device()
    gpu.tell(DEMOTE)
    gpu.end()
    gpu.tell(LOAD)
    assert (gpu.under_way, gpu.tier) == ([TransferModel], "device")
    assert gpu.ask() == []
    gpu.batches()
    assert gpu.under_way == [TransferModel]
    assert gpu.end() == loaded_to("device", copied=True)
    gpu.batches()
    assert gpu.under_way == [RunBatch]


def test_only_the_copy_in_host_memory_goes_while_the_model_computes() -> None:
    gpu = on_device()
    drop = UnloadInstance(instance="i", tier="host")
    gpu.tell(drop)
    assert gpu.work == [], "there is none"
    for order in (DEMOTE, LOAD):
        gpu.tell(order)
        gpu.end()
    gpu.ask()
    gpu.batches()
    gpu.tell(drop)
    gpu.tell(drop)
    assert [do.command for do in gpu.work][1:] == [TransferModel("i", "device", copied=False)]
    assert gpu.end(1) == loaded_to("device")
    gpu.end()
    gpu.tell(DEMOTE)
    assert gpu.under_way == [TransferModel]
    assert gpu.end() == loaded_to("host")


def test_a_preloaded_model_stays_in_host_memory_until_it_is_loaded() -> None:
    gpu = OneGpu()
    gpu.tell(PRELOAD)
    assert gpu.work[0].command == LoadModel("i", RECORD, (), "host")
    assert gpu.end() == loaded_to("host")
    assert gpu.work == []
    gpu.tell(PRELOAD)
    assert gpu.work == []
    gpu.tell(LOAD)
    assert gpu.under_way == [TransferModel]


def test_what_cannot_be_demoted_or_is_warm_is_unloaded() -> None:
    gpu = on_device()
    gpu.tell(DEMOTE)
    said = gpu.end(fails=True)
    assert [type(one) for one in said] == [InstanceUnloaded]
    assert gpu.under_way == [UnloadModel]
    gpu = on_device()
    gpu.tell(DEMOTE)
    gpu.end()
    assert [type(one) for one in gpu.tell(UNLOAD)] == [InstanceUnloaded]
    assert gpu.under_way == [UnloadModel]


def test_who_has_no_such_instance_says_that_it_is_gone() -> None:
    gpu = OneGpu()
    [gone] = gpu.tell(UNLOAD)
    assert isinstance(gone, InstanceUnloaded)
    assert (gone.instance, gpu.work) == ("i", [])


def test_what_cannot_come_back_has_failed_and_its_queries_go_elsewhere() -> None:
    gpu = on_device()
    gpu.tell(DEMOTE)
    gpu.end()
    gpu.tell(LOAD)
    gpu.ask()
    failed, back = gpu.end(fails=True)
    assert isinstance(failed, InstanceFailed)
    assert back.reason == "load_failed"
    assert gpu.tier is None


def test_a_load_before_a_demotion_has_begun_keeps_it() -> None:
    gpu = on_device()
    gpu.ask()
    gpu.tell(DEMOTE)
    assert gpu.tell(LOAD) == loaded_to("device")
    assert gpu.ask() == []
    gpu.batches()
    gpu.end()
    assert gpu.work == []


@given(st.lists(st.sampled_from(["load", "preload", "demote", "unload", "ask", "batches", "end", "fail"]), max_size=60))
@example(["preload", "load", "ask", "demote"])
@example(["load", "end", "demote", "load", "ask", "unload"])
def test_whatever_is_ordered_in_any_order_one_step_is_taken_at_a_time_and_no_query_is_lost(steps: list[str]) -> None:
    gpu, orders = OneGpu(), {"load": LOAD, "preload": PRELOAD, "demote": DEMOTE, "unload": UNLOAD}
    goals: dict[str, dict[str, str]] = {
        "load": {"absent": "device", "host": "device"},
        "preload": {"absent": "host"},
        "demote": {"device": "host"},
        "unload": {"device": "leaving", "host": "leaving"},
    }
    goal = "absent"
    for step in steps:
        heard = len(gpu.said)
        if step in orders:
            gpu.tell(orders[step])
            goal = goals[step].get(goal, goal)
        elif step == "ask":
            gpu.ask()
        elif step == "batches":
            gpu.batches()
        elif gpu.work:
            gpu.end(fails=step == "fail")
        if any(isinstance(one, InstanceUnloaded | InstanceFailed) for one in gpu.said[heard:]):
            goal = "absent"
        assert len([do for do in gpu.work if not isinstance(do.command, UnloadModel)]) <= 1, (
            "it computes and moves at once"
        )
    gpu.finish()
    assert sum(isinstance(one, HandBack | Answer | Refusal) for one in gpu.said) == gpu.sent
    assert gpu.tier == {"device": "device", "host": "host"}.get(goal)
    assert [one.ready for one in gpu.actor.instances.values()] == {"device": [True], "host": [False]}.get(goal, [])


# -- A new executor process loads what the one before it has, and is the same executor from then on.
CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)
DONE = LoadedModel(load_ms=1.0, memory_mb=1.0, proof="")


def tell(actor: Executor, message: Any, reply: str = "") -> list[Effect]:
    return list(actor.handle(Envelope(NOW, message, "", reply)))


def executor(incarnation: int, held: HeldInstances | None = None) -> Executor:
    return make_executor(Settings(), Subjects(), "w", CPU, incarnation, held)


def held_by(actor: Executor) -> HeldInstances:
    [reply] = tell(actor, SucceedExecutor(), "_INBOX.new")
    assert reply.subject == "_INBOX.new"
    held: HeldInstances = reply.message
    return held


def said(effects: list[Effect], kind: type) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Publish) and isinstance(effect.message, kind)]


def loads(effects: list[Effect]) -> dict[str, LoadModel]:
    return {
        effect.command.instance: effect.command
        for effect in effects
        if isinstance(effect, Do) and isinstance(effect.command, LoadModel)
    }


def before() -> Executor:
    """An executor with an instance on cores to which it was moved, a warm one, one that it still loads, and one that goes."""
    actor = executor(1)
    for instance in ("served", "going"):
        tell(actor, LoadInstance(instance=instance, variant=variant(), price_per_s=1e-5, cores=[0]))
        tell(actor, Done(("load", instance), DONE))
    [move] = [effect for effect in tell(actor, MoveInstance(instance="served", cores=[1])) if isinstance(effect, Do)]
    tell(actor, Done(move.id, MovedModel("")))
    tell(actor, LoadInstance(instance="warm", variant=variant(), tier="host"))
    tell(actor, LoadInstance(instance="loading", variant=variant()))
    tell(actor, UnloadInstance(instance="going"))
    return actor


def test_it_tells_its_successor_what_it_has_and_will_have() -> None:
    held = held_by(before())
    assert held.incarnation == 1
    assert {(one.instance, one.tier, tuple(one.cores), one.price_per_s) for one in held.instances} == {
        ("served", "device", (1,), 1e-5),
        ("warm", "host", (), 0.0),
        ("loading", "device", (), 0.0),
    }
    assert tell(before(), SucceedExecutor()) == [], "nobody waits for a reply"


def test_a_successor_loads_all_of_it_and_says_nothing_of_itself_before() -> None:
    actor = executor(2, held_by(before()))
    effects = tell(actor, Started())
    assert {name: (one.cores, one.tier) for name, one in loads(effects).items()} == {
        "served": ((1,), "device"),
        "warm": ((), "host"),
        "loading": ((), "device"),
    }
    for instance in ("served", "loading"):
        assert "models that it loads" in ExecutorInsight().missing(actor, NOW)
        assert said(tell(actor, ReportDue()), ExecutorReport) == [], "its monitor would take the others for lost"
        [loaded] = said(tell(actor, Done(("load", instance), DONE)), InstanceLoaded)
        assert loaded.incarnation == 1
    assert next(effect for effect in tell(actor, ReportDue()) if isinstance(effect, After)).delay > 0
    tell(actor, Done(("load", "warm"), LoadedModel(load_ms=1.0, memory_mb=1.0, proof="", tier="host")))
    assert ExecutorInsight().missing(actor, NOW) == ""
    [report] = said(tell(actor, ReportDue()), ExecutorReport)
    assert report.incarnation == 1
    assert {sample.instance for sample in report.samples} == {"served", "warm", "loading"}


def test_a_model_that_does_not_load_again_holds_nothing_up() -> None:
    actor = executor(2, held_by(before()))
    tell(actor, Started())
    tell(actor, UnloadInstance(instance="loading"))
    for instance in ("served", "warm"):
        tell(
            actor,
            Done(
                ("load", instance),
                LoadedModel(load_ms=1.0, memory_mb=1.0, proof="", tier="host" if instance == "warm" else "device"),
            ),
        )
    tell(actor, Done(("load", "loading"), DONE))
    assert ExecutorInsight().missing(actor, NOW) == ""


def test_successors_need_room_report_at_once_and_share_queries() -> None:
    actor = executor(7)
    tell(actor, Started())
    [report] = said(tell(actor, ReportDue()), ExecutorReport)
    assert report.incarnation == 7
    held = held_by(before())
    needed = sum(one.variant.profile.memory_mb for one in held.instances)
    assert fits_twice(held, Device(name="gpu-0", kind="gpu", cores=1, memory_mb=2 * needed))
    assert not fits_twice(held, Device(name="gpu-0", kind="gpu", cores=1, memory_mb=2 * needed - 1))
    [inlet] = [inlet for inlet in executor(1).inlets if inlet.subject == Subjects().execute("w", "cpu")]
    assert inlet.queue
