"""Whatever is ordered, and whatever executors do, a monitor keeps its promises."""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.messages.events import CostEvent, StateEvent
from bus.messages.fleet import ExecutorExited, LoadAccepted, Release
from bus.messages.scaling import Drain
from services.core.actor import Changed
from services.core.lifecycle import legal
from services.core.placement import quarantine_key
from tests.support.data.examples import examples
from tests.support.simulated.monitored_worker import CPU, S, World, variant

VARIANTS = {name: variant(name, memory_mb=memory) for name, memory in (("a", 100.0), ("b", 250.0), ("c", 400.0))}
LIMIT = 800.0


class Walk(RuleBasedStateMachine):
    """Orders, releases, work, failures, deaths and silence in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.started = self.world.now
        self.deaths = 0
        self.world.catalogue(*VARIANTS.values())

    @rule(name=st.sampled_from("abc"), at_least=st.integers(0, 4), app=st.sampled_from([None, "faces", "digits"]))
    def order(self, name: str, at_least: int, app: str | None) -> None:
        reply = self.world.ensure(VARIANTS[name], at_least, app)
        if isinstance(reply, LoadAccepted):
            assert len(reply.instances) >= at_least
            assert not any(self.world.told()[instance].reclaimable for instance in reply.instances)
            assert len(set(reply.instances)) == len(reply.instances)
        else:
            assert reply.reason

    @rule(name=st.sampled_from("abc"), keep=st.integers(0, 2))
    def release(self, name: str, keep: int) -> None:
        self.world.tell(Release(variant=name, keep=keep))
        serving = [s for s in self.world.told().values() if s.variant == name and s.state != "Unloading"]
        assert len(serving) <= max(keep, 0)

    @rule(name=st.sampled_from("abc"), keep=st.integers(0, 2))
    def mark(self, name: str, keep: int) -> None:
        world, order = self.world, Release(variant=name, keep=keep, reclaim=True)
        going = {instance for instance, state in world.states().items() if state == "Unloading"}
        world.tell(order)
        present = [s for s in world.told().values() if s.variant == name and s.state != "Unloading"]
        assert sum(not status.reclaimable for status in present) <= keep
        assert {instance for instance, state in world.states().items() if state == "Unloading"} == going
        told, events = world.told(), len(world.events)
        world.tell(order)
        assert (world.told(), len(world.events)) == (told, events), "the same order again changes nothing"

    @precondition(lambda self: self.world.executor is not None)
    @rule(fail=st.sampled_from(["", "", "no such operator"]))
    def executor_obeys(self, fail: str) -> None:
        self.world.obey(fail=fail)

    @precondition(lambda self: self.world.executor is not None)
    @rule(data=st.data(), slower=st.sampled_from([1.0, 4.0]))
    def executor_reports(self, data: st.DataObject, slower: float) -> None:
        names = st.sampled_from(sorted(self.world.loaded) or [""])
        served = data.draw(
            st.dictionaries(names, st.dictionaries(st.sampled_from(["faces", "cars"]), st.integers(1, 60)))
        )
        self.world.report(served, queued=data.draw(st.dictionaries(names, st.integers(0, 200))), slower=slower)

    @precondition(lambda self: self.world.executor is not None)
    @rule(told=st.booleans())
    def executor_dies(self, told: bool) -> None:
        world = self.world
        if told:
            world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed"))
        world.obey()
        world.executor, world.loaded = None, {}

    @precondition(lambda self: self.world.executor is None)
    @rule()
    def executor_starts(self) -> None:
        self.deaths += 1
        self.world.obey()  # orders to nobody are lost
        self.world.executor = 1 + self.deaths
        self.world.report()

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds, reporting=self.world.executor is not None)

    @rule(name=st.sampled_from("abc"))
    def operator_releases(self, name: str) -> None:
        self.world.tell(Changed(S.control_bucket, quarantine_key("w1", name), None))
        assert name not in self.world.beat.quarantined

    @rule(resume=st.booleans())
    def drained_or_back(self, resume: bool) -> None:
        self.world.tell(Drain(epoch=0, resume=resume))
        assert self.world.beat.draining != resume
        before = len(self.world.told())
        self.world.ensure(VARIANTS["a"], 1 + before)
        assert resume or len(self.world.told()) == before

    @invariant()
    def memory_is_never_promised_twice(self) -> None:
        [device] = self.world.beat.devices
        assert device.memory_used_mb + device.memory_reclaimable_mb <= LIMIT
        taken = sum(VARIANTS[name].profile.memory_mb for name in self.world.loaded.values())
        assert taken <= LIMIT, "what is loaded and what is still unloading share the memory"

    @invariant()
    def every_move_is_legal_and_continues_the_last(self) -> None:
        at: dict[tuple[str | None, str], str] = defaultdict(lambda: "Inactive")
        for event in self.world.of(StateEvent):
            key = (event.app, event.instance)
            assert event.from_state == at[key], event
            fresh = event.from_state == "Inactive"  # an app may join an instance in any state
            released = (event.from_state, event.to_state) == ("Quarantined", "Inactive")
            assert fresh or released or legal(event.from_state, event.to_state), event  # type: ignore[arg-type]
            at[key] = event.to_state
            assert event.reason

    @invariant()
    def history_and_heartbeat_agree(self) -> None:
        at: dict[tuple[str, str | None], str] = {}
        for event in self.world.of(StateEvent):
            at[event.instance, event.app] = event.to_state
        told = self.world.told()
        for (instance, app), state in at.items():
            if instance not in told:
                assert state == "Inactive" or instance.removesuffix(".w1") in self.world.beat.quarantined
            elif app is not None:
                assert told[instance].app_states.get(app, told[instance].state) == state

    def teardown(self) -> None:
        self.world.stop()
        bill = CPU.cores * 0.048 / 3600 * (self.world.now - self.started)
        assert abs(sum(row.cost for row in self.world.of(CostEvent)) - bill) <= 1e-9 * max(1.0, bill)


Walk.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestWalk = Walk.TestCase
