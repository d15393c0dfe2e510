"""The registrar and releases: how a version was registered, and what is kept of the counts."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord, ModelRecord
from bus.messages.quality import ArmCounts, ReleaseCounted
from bus.messages.verbs import AbortRelease
from services.registrar.commands import PutFigures, StepRelease
from tests.support.simulated.registrations import REQUEST, SUBJECTS, Stage, complete, registered, to_building


def register(stage: Stage, release: str) -> AppRecord:
    """A second version, to its end; the app then."""
    complete(stage, to_building(stage, replace(REQUEST, registration=f"r-{release}", release=release)))
    assert stage.ends(f"r-{release}") == ["done"]
    return decode(AppRecord, stage.catalog["app.digits"])


def test_a_new_version_is_held_or_released_in_steps_as_it_was_registered() -> None:
    """`infaas register --release`."""
    stage = registered()
    app = register(stage, "hold")
    assert (app.links, app.release) == ({"mlp": "1"}, None)
    assert stage.registrar._catalog.model("mlp").version == "1", "no query without an app gets it"  # type: ignore[union-attr]
    app = register(stage, "steps")
    assert app.links == {"mlp": "1"}
    assert (app.release.version, app.release.old_version, app.release.state) == ("3", "1", "step")
    assert stage.register(replace(REQUEST, registration="r9")).error.message.startswith(
        "app: digits has a release of mlp"
    )
    stage.change(AbortRelease(app="digits"))
    app = register(stage, "mirror")
    assert (app.release.state, app.release.mirror, app.release.share, app.release.step) == ("mirror", 0.1, 0.0, -1)
    assert app.release.differs == pytest.approx(0.1 + 2 * (1.0 - 0.9)), "what both errors allow, and 0.1"
    stage.change(AbortRelease(app="digits"))
    app = register(stage, "at-once")
    assert app.links == {"mlp": "5"}


def test_a_first_version_serves_at_once_and_one_without_an_app_has_no_queries() -> None:
    stage = Stage()
    assert register(stage, "steps").links == {"mlp": "1"}
    assert not decode(ModelRecord, stage.catalog["model.mlp.1"]).held
    refused = stage.register(replace(REQUEST, app="_", registration="r2", release="hold"))
    assert "release: a model without an app" in refused.error.message


def test_counts_are_kept_and_a_verdict_is_carried_out_once() -> None:
    stage = registered()
    app = register(stage, "steps")
    assert app.release is not None

    def commands(kind: type) -> list[Any]:
        return [one.command for one in stage.commands if isinstance(one.command, kind)]

    def count(dispatcher: str, right: float) -> None:
        arms = [ArmCounts(0, True, 500, labels=500, right=right), ArmCounts(0, False, 500, labels=500, right=490.0)]
        stage.tell(ReleaseCounted(dispatcher, "digits", app.release.release, arms))  # type: ignore[union-attr]

    count("d0", 490.0)
    assert commands(StepRelease) == []
    count("d1", 100.0)
    count("d1", 100.0)
    [step] = commands(StepRelease)
    assert (step.was, step.state) == ((app.release.release, "step", 0), "rolled-back")
    stage.tick()
    [kept] = commands(PutFigures)
    assert set(kept.figures.counted) == {"d0", "d1"}
    stage.tell(ReleaseCounted("d0", "digits", "another", []))
    stage.tell(ReleaseCounted("d0", "other", "another", []))
    assert len(commands(StepRelease)) == 1
    stage.commands = [one for one in stage.commands if isinstance(one.command, StepRelease)]
    stage.perform()
    after = decode(AppRecord, stage.catalog["app.digits"]).release
    assert after.state == "rolled-back"
    assert SUBJECTS.registrar("release") == "t.registrar.release"
