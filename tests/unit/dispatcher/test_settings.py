"""What settings of the dispatcher do to its queries."""

import pytest

from bus.messages.catalog import Ensemble
from bus.messages.fleet import ExecutorExited
from services.core.settings import DispatcherSettings, EnsembleSettings, Settings
from tests.support.simulated.fleet import Fleet, refused, variant


def test_a_query_without_an_objective_may_take_as_long_as_the_settings_say() -> None:
    for seconds in (1.0, 4.0):
        fleet = Fleet(variant(), settings=Settings(dispatcher=DispatcherSettings(default_deadline_s=seconds)))
        fleet.devices["w0"].slow = 1e6
        asked = fleet.ask(seconds=0.8 * seconds)
        assert fleet.replies(asked) == []
        refused(fleet.reply(asked, 0.3 * seconds), "deadline")


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_what_a_silent_worker_has_is_tried_on_another_one_after_as_long_as_the_settings_say(seconds: float) -> None:
    settings = Settings(dispatcher=DispatcherSettings(failure_timeout_s=seconds))
    fleet = Fleet(variant(), workers=2, settings=settings)
    home = fleet.replies(fleet.ask(seconds=1.0))[0]["worker"]
    fleet.devices[home].slow = 1e6
    asked = fleet.ask(seconds=0.001)
    silent = fleet.stage.now
    for process in (home, f"{home}/cpu"):
        fleet.stage.kill(process)
    fleet.stage.run(20.0)
    [at] = [at for at, subject, _ in fleet.stage.heard if subject == f"_INBOX.test.{asked}"]
    assert seconds - 0.5 < at - silent < seconds + 1.0
    [reply] = fleet.replies(asked)
    assert reply["worker"] != home


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_query_may_lose_its_process_as_often_as_the_settings_say(attempts: int) -> None:
    settings = Settings(dispatcher=DispatcherSettings(max_attempts=attempts))
    fleet = Fleet(variant(), settings=settings)
    fleet.ask(seconds=1.0)
    asked = fleet.ask(latency_ms=20_000.0)
    deaths = 0
    for _ in range(2000):
        device = fleet.devices["w0"]
        if len(device.batches) > (not deaths):
            deaths += 1
            fleet.stage.kill("w0/cpu")
            exited = ExecutorExited(worker="w0", device="cpu", at=fleet.stage.now, reason="crashed")
            fleet.stage.publish(fleet.subjects.exited("w0", "cpu"), exited, seconds=0.1)
            fleet.start_executor("w0")
        fleet.stage.run(0.001)
        if fleet.replies(asked):
            break
    [reply] = fleet.replies(asked)
    refused(reply, "model_error")
    assert deaths == attempts + 1


@pytest.mark.parametrize("most", [2, 10])
def test_as_many_contexts_are_held_as_the_settings_say(most: int) -> None:
    members = [variant(f"{model}-v1-ort-fp32-t1-b8", model=model) for model in ("m", "n")]
    fleet = Fleet(*members, settings=Settings(selection=EnsembleSettings(max_contexts=most)))
    fleet.change(selection=Ensemble(policy="exp4", contextual=True))
    for number in range(5):
        fleet.ask(context=f"user-{number}", seconds=1.0)
    assert len(fleet.stage.members["d0"].actor.composites.contexts) == min(5, most)
