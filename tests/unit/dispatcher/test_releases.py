"""A release on virtual time: dispatchers, executors, monitors and the registrar; shares, labels, and how it ends."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Ensemble, PipelineRecord, PipelineVertex
from bus.messages.events import ReleaseEvent
from bus.messages.jobs import OFFLINE
from bus.messages.quality import AppQuality
from bus.messages.verbs import Prune
from services.core.actor import Changed, Synced
from services.core.settings import Settings
from services.dispatcher.copies import named
from services.registrar.actor import make_registrar
from services.registrar.changes import AMENDMENTS, amend
from services.registrar.commands import Pruned, PutFigures, error_of
from services.registrar.edge import Amended
from services.registrar.releases import stamped
from tests.support.data.events import catalog_of
from tests.support.simulated.fleet import Fleet, catalogue, variant

NEW = variant("m-v2-ort-fp32-t1-b8", version="2")
START = {"app": "app", "model": "m", "steps": [0.5], "least": 1.0}


class Releasing(Fleet):
    """A fleet with a registrar, whose app serves version 1 of a model that has a version 2."""

    def __init__(self, *variants: Any, **how: Any) -> None:
        given = {key: how.pop(key) for key in ("dispatchers", "workers") if key in how}
        super().__init__(*(variants or (variant(),)), **given)
        self.stage.listen(self.subjects.execute("*", "*"))
        *records, _ = catalogue(NEW)
        self.add(*(replace(one, created=2.0) if hasattr(one, "created") else one for one in records))
        self.figures: dict[str, bytes] = {}
        self.start_registrar()
        self.order(NEW)
        self.reply(self.ask(seconds=1.0))
        if how:
            self.behave(**how)

    def start_registrar(self, name: str = "r0") -> None:
        actor = make_registrar(Settings(), self.subjects, name, lambda: "r-1")
        self.stage.enter(name, actor, self.carry_out)
        self.follow(name)
        for key, value in self.figures.items():
            self.stage.send(name, Changed("infaas-control", key, value))
        for bucket in ("infaas-status", "infaas-control"):
            self.stage.send(name, Synced(bucket))

    def carry_out(self, command: Any) -> tuple[float, Any]:
        """As the registrar's edge does."""
        if isinstance(command, PutFigures):
            key = f"release.{command.app}"
            self.figures[key] = encode(command.figures)
            for name, member in self.stage.members.items():
                if any(watch.bucket == "infaas-control" for watch in member.actor.watches):
                    self.stage.send(name, Changed("infaas-control", key, self.figures[key]))
            return 0.001, None
        if isinstance(command, Prune):
            return 0.001, Pruned("nothing was deleted")
        if type(command) not in AMENDMENTS:
            return 0.001, None
        before = next((one for one in self.records if isinstance(one, AppRecord) and one.app == command.app), None)
        after = amend(before, command, catalog_of(*self.records))
        if not isinstance(after, AppRecord):
            return 0.001, after or error_of("no app is left")
        after = stamped(before, after, self.stage.now)
        self.records[self.records.index(before)] = after
        self.tell(after)
        return 0.001, Amended.of(before, after, "").moved

    def operator(self, verb: str, **fields: Any) -> str:
        """What an operator is told: "done", or why it is refused."""
        reply = self.request(self.subjects.admin(verb), fields)
        self.stage.run(0.2)
        return "done" if reply.get("done") else str(reply["error"]["message"])

    def start(self, **changes: Any) -> None:
        assert self.operator("start-release", **(START | changes)) == "done"

    def shown(self, app: str = "app") -> dict[str, Any]:
        [item] = self.request(self.subjects.list("releases"), {"app": app})["items"]
        return dict(item)

    def load(self, count: int, *, labelled: bool = False, app: str = "app", every: float = 0.01) -> list[str]:
        """So many queries one after the other, each with the label 0 if it is answered; the versions that answered."""
        versions = []
        for _ in range(count):
            reply = self.reply(self.ask(app), every)
            versions.append(reply.get("version", ""))
            if labelled and "query" in reply:
                self.stage.publish(self.subjects.feedback(app), {"query": reply["query"], "label": 0}, "_INBOX.f")
        return versions

    def until(self, state: str, most: int = 100, **how: Any) -> dict[str, Any]:
        """Load until the release is in this state."""
        for _ in range(most):
            self.load(100, **how)
            if (found := self.shown())["state"] == state:
                return found
        raise AssertionError(self.shown())

    def events(self) -> list[ReleaseEvent]:
        return [event for kind, event in self.stage.records if kind == "release"]


def test_dispatchers_agree_on_a_share_and_a_context_keeps_its_version_as_it_grows() -> None:
    fleet = Releasing(dispatchers=3)
    fleet.start(steps=[0.2, 0.5], least=3600.0)

    def versions() -> dict[str, str]:
        said = [(context, fleet.ask(context=context)) for context in map(str, range(200)) for _ in range(3)]
        fleet.stage.run(5.0)
        found: dict[str, set[str]] = {}
        for context, label in said:
            found.setdefault(context, set()).add(fleet.reply(label)["version"])
        assert all(len(one) == 1 for one in found.values())
        return {context: one.pop() for context, one in found.items()}

    first = versions()
    assert 20 < Counter(first.values())["2"] < 60
    [release] = [one.release for one in fleet.records if isinstance(one, AppRecord)]
    assert release is not None
    fleet.change(release=replace(release, step=1), seconds=0.1)
    second = versions()
    assert 70 < Counter(second.values())["2"] < 130
    assert [context for context, version in first.items() if version == "2" and second[context] != "2"] == []
    assert fleet.reply(fleet.ask(version="1"), 0.1)["version"] == "1"
    assert fleet.operator("abort-release", app="app") == "done"
    assert set(versions().values()) == {"1"}


def test_a_version_that_labels_show_to_be_worse_goes_back_within_seconds() -> None:
    fleet = Releasing(dispatchers=2, says={"m@2": 1.0})
    fleet.start()
    assert "2" in fleet.load(100, labelled=True)
    found = fleet.until("rolled-back", labelled=True)
    assert "shown to be worse: accuracy 0 (" in found["reason"]
    assert set(fleet.load(50)) == {"1"}
    assert [(one.state, one.share) for one in fleet.events()] == [("step", 0.5), ("rolled-back", 0.0)]
    began, ended = fleet.events()
    assert ended.release == began.release
    assert (ended.version, ended.old_version) == ("2", "1")
    accuracy = next(one for one in found["figures"] if one["measure"] == "accuracy")
    assert (accuracy["new"], accuracy["old"]) == (0.0, 1.0)
    assert accuracy["high"] < -0.005


@pytest.mark.parametrize("how", [{"late": {"m@2": 3.0}}, {"fails": {"m@2"}}])
def test_a_version_that_is_slower_or_fails_goes_back_without_labels(how: dict[str, Any]) -> None:
    fleet = Releasing(**how)
    fleet.start(steps=[0.1, 0.5], least=3600.0)
    found = fleet.until("rolled-back")
    assert (found["step"], found["share"]) == (0, 0.0)
    assert ("latency" if "late" in how else "errors") in found["reason"]


def test_a_version_that_is_as_good_is_promoted_step_by_step() -> None:
    fleet = Releasing()
    fleet.start(steps=[0.3, 0.6])
    found = fleet.until("promoted")
    assert found["share"] == 1.0
    assert [(one.state, one.share) for one in fleet.events()] == [("step", 0.3), ("step", 0.6), ("promoted", 1.0)]
    assert set(fleet.load(20)) == {"2"}
    assert fleet.shown()["lacks"] == ""


def test_proving_waits_for_labels_and_says_how_many() -> None:
    fleet = Releasing()
    fleet.start(prove=True, margin=0.05)
    fleet.load(1000)
    assert "labels of answers of both versions" in fleet.shown()["lacks"]
    fleet.load(100, labelled=True)
    fleet.stage.run(1.5)
    assert "labels more" in fleet.shown()["lacks"]
    assert fleet.until("promoted", labelled=True)["reason"].startswith("not worse in ")


def test_one_that_is_held_reports_and_stays_and_one_that_is_paused_goes_on() -> None:
    fleet = Releasing()
    fleet.start(hold=True)
    assert fleet.until("step", 15)
    fleet.load(1000)
    assert fleet.shown()["state"] == "step"
    assert fleet.operator("pause-release", app="app") == "done"
    assert fleet.shown()["state"] == "paused"
    assert fleet.operator("pause-release", app="app", resume=True) == "done"
    assert fleet.shown()["state"] == "step"
    assert fleet.operator("promote-release", app="app") == "done"
    assert set(fleet.load(20)) == {"2"}
    assert "has no release under way" in fleet.operator("promote-release", app="app")


def test_versions_are_not_changed_by_hand_meanwhile() -> None:
    fleet = Releasing()
    fleet.start()
    for verb, more in (
        ("set-version", {"version": "2"}),
        ("unlink-model", {}),
        ("link-model", {}),
        ("start-release", {}),
    ):
        assert "infaas.admin.abort-release" in fleet.operator(verb, app="app", model="m", **more), verb
    assert fleet.operator("abort-release", app="app") == "done"
    assert "serves version 1 of m already" in fleet.operator("start-release", app="app", model="m", version="1")
    assert "steps must grow" in fleet.operator("start-release", app="app", model="m", steps=[0.5, 0.1]).replace(":", "")
    assert "does not link" in fleet.operator("start-release", app="app", model="n")


def test_it_goes_on_where_it_was_after_any_process_has_ended() -> None:
    fleet = Releasing(says={"m@2": 1.0})
    fleet.start(least=3600.0)
    fleet.load(10, labelled=True)
    fleet.stage.run(2.0)
    before = fleet.shown()["figures"]
    fleet.stage.kill("r0")
    fleet.stage.kill("d0")
    fleet.start_registrar("r1")
    fleet.start_dispatcher("d1", 0.5)
    for key, value in fleet.figures.items():
        fleet.stage.send("d1", Changed("infaas-control", key, value))
    fleet.stage.run(1.0)
    assert fleet.shown()["figures"] == before
    fleet.load(10, labelled=True)
    fleet.stage.run(2.0)
    counts = [(one["new_n"] + one["old_n"]) for one in fleet.shown()["figures"] if one["measure"] == "accuracy"]
    assert counts == [20]
    fleet.until("rolled-back", labelled=True)


def test_a_version_that_gets_no_queries_is_listed_by_its_name() -> None:
    fleet = Releasing()

    def listed(**about: str) -> list[str]:
        found = fleet.request(fleet.subjects.list("variants"), {"app": "app", **about})["items"]
        return [one["version"] for one in found]

    assert (listed(), listed(version="2")) == (["1"], ["2"])
    fleet.start(least=3600.0)
    assert sorted(listed()) == ["1", "2"]


def test_the_old_version_answers_until_the_new_one_is_loaded() -> None:
    fleet = Releasing()
    slow = variant("m-v3-ort-fp32-t1-b8", version="3", load_ms=2000.0)
    fleet.add(*(replace(one, created=3.0) if hasattr(one, "created") else one for one in catalogue(slow)[:-1]))
    fleet.start(version="3")
    assert set(fleet.load(20)) == {"1"}
    fleet.stage.run(3.0)
    assert set(fleet.load(40)) == {"1", "3"}


def test_a_mirror_answers_copies_that_nobody_gets_and_steps_follow() -> None:
    fleet = Releasing(dispatchers=2)
    fleet.start(steps=[0.5], mirror=0.5)
    assert fleet.shown()["share"] == 0.0
    found = fleet.request(fleet.subjects.explain("app"), {})["candidates"]
    assert "a share of 0 of the queries gets it, and copies of 0.5" in next(
        one["why_not"] for one in found if one["version"] == "2"
    )
    assert set(fleet.load(300)) == {"1"}
    for verb in ("set-version", "unlink-model"):
        more = {"version": "2"} if verb == "set-version" else {}
        assert "infaas.admin.abort-release" in fleet.operator(verb, app="app", model="m", **more)
    assert fleet.operator("pause-release", app="app") == "done"
    assert fleet.operator("pause-release", app="app", resume=True) == "done"
    assert fleet.shown()["state"] == "mirror"
    copies = fleet.copies()
    assert 100 < len(copies) < 200
    assert {(one.version, one.policy) for one in copies} == {("2", OFFLINE)}
    assert OFFLINE not in {one.policy for one in fleet.outcomes()}
    found = fleet.until("step")
    agreement = next(one for one in found["figures"] if one["measure"] == "agreement")
    assert (agreement["step"], agreement["new"]) == (0, 1.0)
    fleet.until("promoted")
    states = [("mirror", 0.0), *[("paused", 0.0), ("mirror", 0.0)], ("step", 0.5), ("promoted", 1.0)]
    assert [(one.state, one.share) for one in fleet.events()] == states
    assert set(fleet.load(20)) == {"2"}


@pytest.mark.parametrize("how", [{"says": {"m@2": 1.0}}, {"late": {"m@2": 3.0}}, {"fails": {"m@2"}}])
def test_a_version_that_is_worse_in_a_mirror_goes_back_without_labels_or_clients(how: dict[str, Any]) -> None:
    fleet = Releasing(**how)
    fleet.start(mirror=0.5, least=3600.0)
    assert set(fleet.load(100)) == {"1"}
    found = fleet.until("rolled-back")
    assert "in the mirror of a share of 0.5" in found["reason"]
    assert [(one.state, one.share) for one in fleet.events()] == [("mirror", 0.0), ("rolled-back", 0.0)]


def test_a_mirror_that_is_held_stays_and_an_executor_that_a_copy_ends_is_its_error() -> None:
    fleet = Releasing()
    fleet.start(steps=[], mirror=1.0, hold=True)
    fleet.load(600)
    fleet.stage.run(1.0)
    assert (fleet.shown()["state"], fleet.shown()["lacks"]) == ("mirror", "")
    client = fleet.ask()
    while not (copy := set(fleet.running("w0"))) or not fleet.replies(client):
        fleet.stage.run(0.0005)
    fleet.end_executor("w0", [*copy], 2.0)
    errors = next(one for one in fleet.shown()["figures"] if one["measure"] == "errors")
    assert errors["new"] < errors["old"] == 1.0


def test_copies_keep_no_floor_of_their_queries() -> None:
    fleet = Releasing(variant(accuracy=0.95))
    fleet.start(mirror=1.0, least=3600.0)
    for _ in range(20):
        assert fleet.reply(fleet.ask(accuracy=0.95), 0.02)["version"] == "1"
    assert len(fleet.copies()) > 10


def test_an_instance_that_has_a_copy_gets_no_other() -> None:
    fleet = Releasing(late={"m@2": 20.0})
    fleet.start(mirror=1.0, least=3600.0)
    fleet.load(50)
    assert len(fleet.copies()) < 25


def test_a_label_counts_for_both_versions_of_a_mirror() -> None:
    fleet = Releasing(says={"m@2": 1.0})
    fleet.start(mirror=1.0, least=3600.0)
    for _ in range(10):
        reply = fleet.reply(fleet.ask(), 0.02)
        fleet.stage.publish(fleet.subjects.feedback("app"), {"query": reply["query"], "label": 0}, "_INBOX.f")
    fleet.stage.run(2.0)
    accuracy = next(one for one in fleet.shown()["figures"] if one["measure"] == "accuracy")
    assert (accuracy["old"], accuracy["old_n"], accuracy["new"]) == (1.0, 10, 0.0)
    assert accuracy["new_n"] >= 8


def test_a_label_that_comes_before_the_copy_scores_it_once() -> None:
    fleet = Releasing(says={"m@2": 1.0}, late={"m@2": 200.0})
    fleet.start(mirror=1.0, least=3600.0)
    for count in (1, 2):
        reply = fleet.reply(fleet.ask(), 0.02)
        for _ in range(2):  # at once, and again after the copy's answer
            word = {"query": reply["query"], "label": 0}
            fleet.stage.publish(fleet.subjects.feedback("app"), word, "_INBOX.f", 2.0)
            accuracy = next(one for one in fleet.shown()["figures"] if one["measure"] == "accuracy")
            assert [accuracy[name] for name in ("old", "old_n", "new", "new_n")] == [1.0, count, 0.0, count]
    quality = next(one for one in fleet.records if isinstance(one, AppQuality))
    assert {name: one.labels for name, one in quality.variants.items()} == {"m-v1-ort-fp32-t1-b8": 2, NEW.variant: 2}


def test_classes_are_compared_by_their_names() -> None:
    one, other = variant(labels=["cat", "dog"]), variant(labels=["dog", "cat"])
    assert named(1, one) == named(0, other) == "dog"
    assert (named([0, 1], one), named(7, one), named("7", variant()), named(True, variant())) == (
        "cat",
        "7",
        "7",
        "True",
    )


def test_large_outputs_of_copies_are_not_stored() -> None:
    fleet = Releasing(wide={"m": 400_000})
    fleet.start(mirror=1.0, least=3600.0)
    fleet.load(5, every=0.2)
    assert len(fleet.copies()) >= 4
    assert len(fleet.contexts.objects) == 5, "one of each query"
    fleet.stage.run(1.0)
    latency = next(one for one in fleet.shown()["figures"] if one["measure"] == "latency")
    assert latency["old_n"] == 0, "how long it took to compute the first answer is not known"


def test_members_and_stages_have_a_mirror_too() -> None:
    other = variant("n-v1-ort-fp32-t1-b8", model="n")
    fleet = Releasing(variant(), other)
    fleet.order(other)
    fleet.change(selection=Ensemble(policy="majority"), seconds=1.0)
    graph = PipelineRecord(
        vertices=[PipelineVertex(name="only", app="app", inputs={"x": "$.x"})], output={"y": "only.y"}
    )
    fleet.add(AppRecord(app="pipe", links={}, latency_ms=1000.0, pipeline=graph, signature=variant().signature))
    fleet.stage.run(0.1)
    fleet.start(mirror=1.0, least=3600.0)
    for app in ("app", "pipe"):
        before = len(fleet.copies())
        members = {tuple(sorted(fleet.reply(fleet.ask(app), 0.05)["members"])) for _ in range(20)}
        assert all("m@2" not in one for one in members)
        assert len(fleet.copies()) - before > 15
    assert {one.version for one in fleet.copies()} == {"2"}
    assert {one.model for one in fleet.copies()} == {"m"}


def test_shares_of_classes_are_those_of_queries_that_no_context_binds_to_a_version() -> None:
    fleet = Releasing(says={"m@2": 1.0})
    fleet.start(least=3600.0)
    for n in range(300):
        fleet.reply(fleet.ask(context=str(n % 6)), 0.01)
    fleet.stage.run(1.0)
    assert "classes" not in {one["measure"] for one in fleet.shown()["figures"]}
    assert "classes (0) 0 " in fleet.until("rolled-back")["reason"]


def test_no_kept_answer_is_of_the_other_version() -> None:
    fleet = Releasing(says={"m@2": 1.0})
    fleet.change(selection=Ensemble(cache_mb=1.0), seconds=0.1)
    fleet.start(least=3600.0)
    seen: Counter[tuple[str, bool]] = Counter()
    for n in range(200):
        reply = fleet.reply(fleet.ask(context=str(n % 20)), 0.02)
        said = b"\0\0\0\0" if reply["version"] == "1" else b"\0\0\x80?"
        assert reply["outputs"]["y"]["data"] == said
        seen[reply["version"], reply["cached"]] += 1
    assert seen["1", True] > 20 < seen["2", True]


def test_a_member_of_an_ensemble_answers_in_the_version_of_its_query() -> None:
    other = variant("n-v1-ort-fp32-t1-b8", model="n")
    fleet = Releasing(variant(), other)
    fleet.order(other)
    fleet.change(selection=Ensemble(policy="majority"), seconds=1.0)
    fleet.start(least=3600.0)
    said: Counter[tuple[str, ...]] = Counter()
    for _ in range(60):
        reply = fleet.reply(fleet.ask(), 0.02)
        said[tuple(sorted(reply["members"]))] += 1
        fleet.stage.publish(fleet.subjects.feedback("app"), {"query": reply["query"], "label": 0}, "_INBOX.f")
    assert set(said) == {("m@1", "n@1"), ("m@2", "n@1")}
    fleet.stage.run(2.0)
    counts = {one["measure"]: one["new_n"] + one["old_n"] for one in fleet.shown()["figures"]}
    assert counts["accuracy"] == counts["attainment"] == 60
    for context in "abcd":
        members = fleet.reply(fleet.ask(context=context), 0.02)["members"]
        found = fleet.request(fleet.subjects.explain("app"), {"context": context})
        assert {one["member"] for one in found["members"]} == set(members)


def test_a_stage_of_a_pipeline_answers_in_the_version_of_its_query() -> None:
    fleet = Releasing()
    graph = PipelineRecord(
        vertices=[PipelineVertex(name="only", app="app", inputs={"x": "$.x"})], output={"y": "only.y"}
    )
    fleet.add(AppRecord(app="pipe", links={}, latency_ms=1000.0, pipeline=graph, signature=variant().signature))
    fleet.stage.run(0.1)
    fleet.start(least=3600.0)
    members = Counter(fleet.reply(fleet.ask("pipe"), 0.02)["members"][0] for _ in range(60))
    assert set(members) == {"m@1", "m@2"}
    fleet.stage.run(2.0)
    assert sum(one["new_n"] + one["old_n"] for one in fleet.shown()["figures"] if one["measure"] == "errors") == 60


def test_explain_and_demand_know_the_release() -> None:
    fleet = Releasing()
    fleet.start(least=3600.0)
    fleet.load(100)
    found = fleet.request(fleet.subjects.explain("app"), {})
    [other] = [one for one in found["candidates"] if one["version"] == "2"]
    assert "is in a release: a share of 0.5" in other["why_not"]
    fleet.stage.run(0.6)
    assert decode(dict[str, Any], encode(fleet.shown()))["lacks"]
