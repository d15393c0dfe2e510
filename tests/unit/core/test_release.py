"""What becomes of a release by what was counted: the judge alone, on counts that are drawn or made up."""

from typing import Any

import pytest
from msgspec.structs import replace

from benches.release import CASES, OLD, Case, Version, run
from bus.codec import encode
from bus.messages.quality import ArmCounts, ReleaseFigures, VersionRelease
from services.core.release import KEY, LEAST, ReleaseBook, arm_of, bucket_of, figures, lacks, mirrored, verdict

RELEASE = VersionRelease(
    release="r", model="m", version="2", old_version="1", steps=[0.1, 0.5], least=60.0, margin=0.005
)


def arm(new: bool, queries: int = 0, **fields: Any) -> ArmCounts:
    fields.setdefault("within", {bucket_of(5.0): queries})
    return ArmCounts(step=fields.pop("step", 0), new=new, queries=queries, **fields)


def counted(*arms: ArmCounts) -> dict[tuple[int, bool], ArmCounts]:
    return {(one.step, one.new): one for one in arms}


LONG = "worse by 3 points, 20 % labelled, proving"


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one == LONG)) for one in CASES])
def test_what_is_worse_goes_back_and_what_is_as_good_is_promoted(name: str) -> None:
    """Some of the runs of the bench, which has a hundred of each."""
    case = CASES[name]
    if case.new == OLD and case.prove:
        case = case._replace(labelled=1.0, steps=(0.5,))  # a proof takes long
    found = [run(case, seed) for seed in range(2)]
    equal = case.new == OLD or case.new.accuracy > case.old.accuracy
    if equal or case.prove or not case.labelled:
        assert {one.state for one in found} == {"promoted" if equal else "rolled-back"}
    if not equal and (case.prove or not case.labelled):
        assert max(one.share for one in found) <= 0.25
    if not case.labelled and not equal:
        assert {one.step for one in found} == {-1 if case.mirror else 0}


def test_a_step_takes_its_time_and_its_answers() -> None:
    enough = counted(arm(True, LEAST), arm(False, 9 * LEAST))
    assert lacks(RELEASE, enough, 20.0) == "40 s more"
    assert verdict(RELEASE, enough, 59.0) is None
    assert verdict(RELEASE, enough, 60.0) == ("step", 1, f"not shown to be worse in {LEAST} answers")
    assert lacks(RELEASE, counted(arm(True, 100), arm(False, 900)), 60.0) == f"{LEAST - 100} answers of version 2 more"
    last = replace(RELEASE, step=1)
    here = counted(arm(True, LEAST, step=1), arm(False, LEAST, step=1))
    assert verdict(last, enough | here, 60.0) == ("promoted", 1, f"not shown to be worse in {LEAST} answers")
    assert verdict(replace(last, hold=True), enough | here, 60.0) is None
    assert verdict(replace(last, state="paused"), enough | here, 60.0) is None
    assert verdict(replace(last, state="promoted"), enough | here, 60.0) is None


def test_what_looks_worse_waits_longer_and_is_not_held_up_for_ever() -> None:
    doubtful = counted(arm(True, 1000, labels=50, right=40.0), arm(False, 9000, labels=450, right=410.0))
    assert lacks(RELEASE, doubtful, 60.0) == "1000 answers of version 2 more"
    late = counted(arm(True, 2000, labels=50, right=40.0), arm(False, 9000, labels=450, right=410.0))
    found = verdict(RELEASE, late, 60.0)
    assert found.state == "step"


def test_a_loss_within_the_margin_counts_as_none() -> None:
    lost = counted(arm(True, 40_000, labels=40_000, right=36_000.0), arm(False, 40_000, labels=40_000, right=36_800.0))
    found = verdict(RELEASE, lost, 60.0)
    assert found.state == "rolled-back"
    assert "accuracy 0.9 (40000) against 0.92 (40000): " in found.reason
    wide = replace(RELEASE, margin=0.05)
    assert verdict(wide, lost, 60.0) is not None
    assert verdict(replace(wide, prove=True), lost, 60.0) == verdict(replace(wide, prove=True), lost, 90.0)
    [accuracy, *_] = figures(wide, lost)
    assert accuracy.proven


def test_what_a_step_has_shown_still_counts_and_labels_may_come_late() -> None:
    """A label counts in the step of its query."""
    first = counted(arm(True, 2000, labels=1000, right=700.0), arm(False, 2000, labels=1000, right=950.0))
    found = verdict(replace(RELEASE, step=1), first, 0.0)
    assert (found.state, found.reason.rpartition("; ")[2]) == ("rolled-back", "in step 1 of 2, share 0.1")


def test_a_few_ms_more_and_half_as_long_again_are_no_slower() -> None:
    def judged(old_ms: float, new_ms: float) -> str:
        arms = counted(
            arm(True, 2000, within={bucket_of(new_ms): 2000}), arm(False, 2000, within={bucket_of(old_ms): 2000})
        )
        found = verdict(RELEASE, arms, 60.0)
        return found.state

    assert [judged(1.0, 3.0), judged(20.0, 60.0), judged(200.0, 400.0)] == ["rolled-back"] * 3
    assert [judged(0.3, 0.9), judged(20.0, 27.0), judged(200.0, 150.0)] == ["step"] * 3


@pytest.mark.parametrize(
    ("often", "state"), [(0.3, "step"), (0.36, "step"), (0.5, "rolled-back"), (0.1, "rolled-back")]
)
def test_a_class_that_is_answered_far_more_or_less_often_is_worse_without_labels(often: float, state: str) -> None:
    def shares(share: float) -> dict[str, float]:
        rest = {f"c{n}": 4000 * (1.0 - share) / 20 for n in range(20)}
        return {"cat": 4000 * share} | rest

    arms = counted(arm(True, 4000, classes=shares(often)), arm(False, 4000, classes=shares(0.3)))
    found = verdict(RELEASE, arms, 60.0)
    assert found.state == state
    if state == "rolled-back":
        assert f"classes ({'all but ' * (often > 0.3)}cat) " in found.reason


def test_a_mirror_is_judged_by_agreement_beyond_what_both_errors_allow_and_is_no_step_of_clients() -> None:
    release = replace(RELEASE, state="mirror", step=-1, mirror=0.2, differs=0.2)
    assert (release.share, release.mirrors, replace(release, state="paused").mirrors) == (0.0, True, True)
    keys = [str(n).encode() for n in range(1000)]
    assert not any(arm_of(release, key).new for key in keys)
    assert 150 < sum(mirrored(release, key) for key in keys) < 250

    def judged(agreed: float, **changes: Any) -> Any:
        new = arm(True, LEAST, step=-1, compared=LEAST, agreed=agreed * LEAST)
        return verdict(replace(release, **changes), counted(new, arm(False, LEAST, step=-1)), 60.0)

    assert judged(0.85)[:2] == ("step", 0)
    assert judged(0.6)[:2] == ("rolled-back", -1)
    assert "agreement 0.6 (400) against 1 (400)" in judged(0.6).reason
    assert judged(0.85, steps=[], hold=True) is None
    assert judged(0.6, steps=[], hold=True)[:2] == ("rolled-back", -1)
    assert judged(0.6, state="paused")[0] == "rolled-back"
    assert judged(0.85, prove=True)[:2] == ("step", 0), "what nobody gets proves nothing of accuracy"


def test_dispatchers_draw_alike_and_a_larger_share_takes_nothing_back() -> None:
    keys = [str(n).encode() for n in range(10_000)]
    small, large = ({key for key in keys if arm_of(replace(RELEASE, step=step), key).new} for step in (0, 1))
    assert small < large
    assert 900 < len(small) < 1100
    assert 4800 < len(large) < 5200
    other = {key for key in keys if arm_of(replace(RELEASE, release="s"), key).new}
    assert len(small & other) < 200, "another release draws anew"


def test_counts_of_all_dispatchers_are_kept_and_only_grow() -> None:

    book = ReleaseBook()
    assert book.add("a", ReleaseFigures(release="r", counted={"d0": [arm(True, 5)]}))
    assert not book.add("a", ReleaseFigures(release="r", counted={"d0": [arm(True, 4)]}))
    assert book.add("a", ReleaseFigures(release="r", counted={"d1": [arm(True, 2)]}))
    assert book.of("a", RELEASE)[0, True].queries == 7
    assert book.of("a", replace(RELEASE, release="other")) == {}
    kept = ReleaseBook()
    kept.change(f"{KEY}a", encode(book["a"]))
    kept.change("batching.app.a", b"x")
    assert kept.of("a", RELEASE)[0, True].queries == 7
    kept.change(f"{KEY}a", None)
    assert not kept


def test_more_labels_are_needed_where_a_proof_is_asked_for() -> None:
    proving = replace(RELEASE, prove=True)
    here = counted(arm(True, 5000, labels=500, right=475.0), arm(False, 5000, labels=500, right=475.0))
    words = lacks(proving, here, 60.0)
    assert words.startswith("about ")
    assert words.endswith(" labels more")
    assert 1000 < int(words.split()[1]) < 1_000_000
    worse = counted(arm(True, 5000, labels=500, right=465.0), arm(False, 5000, labels=500, right=475.0))
    assert "looks worse by 0.020" in lacks(proving, worse, 60.0)
    assert run(Case(Version(0.99), labelled=1.0, steps=(0.5,)), 1).reason.startswith("not worse in ")
