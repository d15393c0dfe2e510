"""What becomes of an app's record, and which operators' verbs are understood."""

import re
from math import inf, nan
from typing import Any

import pytest
from msgspec import NODEFAULT
from msgspec.structs import replace

from bus.codec import encode
from bus.fields import TOKEN, Number
from bus.messages.catalog import AppRecord, BatchingRule, Ensemble, PipelineRecord, Signature
from bus.messages.public import Error
from bus.messages.scaling import Expectation
from bus.messages.verbs import (
    ADMIN_VERBS,
    AddApp,
    AdminVerb,
    DeleteApp,
    DeleteVersion,
    DrainWorker,
    Expect,
    LinkModel,
    ReleaseVariant,
    ResetSelection,
    SetApp,
    SetBatching,
    SetReplicas,
    SetSelection,
    SetTarget,
    SetVersion,
    UnlinkModel,
    body_of,
)
from services.core.catalog import Catalog, key_of
from services.core.demand import expected_qps
from services.registrar.changes import AMENDMENTS, amend, refusal, told
from services.registrar.checks import verb_asked
from services.registrar.commands import LinkVersion
from services.registrar.edge import RegistrarEdge
from tests.support.data.events import catalog_of
from tests.support.simulated.registrations import SIGNATURE, app_record, model_record, variant_record

LINK = LinkVersion(app="digits", record=model_record("cnn"))
VARIANT = variant_record(model="mlp", version="2")
OTHER = Signature(inputs=SIGNATURE.outputs, outputs=SIGNATURE.inputs)


def changed(record: AppRecord | None, change: Any, known: Catalog | None = None) -> AppRecord:
    after = amend(record, change, known or Catalog())
    assert isinstance(after, AppRecord)
    return after


def refused(record: AppRecord | None, change: Any, known: Catalog | None = None) -> Error:
    after = amend(record, change, known or Catalog())
    assert isinstance(after, Error)
    return after


def test_links_make_apps_add_and_keep_what_they_do_not_name() -> None:
    after = changed(None, replace(LINK, create=True, latency_ms=5.0, default_output=[0]))
    expected = AppRecord(app="digits", links={"cnn": "1"}, signature=SIGNATURE, latency_ms=5.0, default_output=[0])
    assert after == expected
    before = app_record(latency_ms=5.0, default_output=[0], min_instances=3, slo_target=0.999)
    assert changed(before, LINK) == replace(before, links={"mlp": "1", "cnn": "1"})
    assert changed(before, replace(LINK, latency_ms=9.0)).latency_ms == 9.0
    assert changed(before, replace(LINK, slo_target=0.9)).slo_target == 0.9
    once = changed(None, replace(LINK, create=True))
    assert changed(once, replace(LINK, create=True)) == once


def test_a_model_that_does_not_fit_is_refused_with_both_signatures() -> None:
    other = replace(LINK, record=model_record("cnn", signature=OTHER))
    error = refused(app_record(), other)
    assert error.code == "bad_request"
    assert "scores" in error.message
    assert changed(app_record(signature=None), other).signature == OTHER
    own = refused(app_record(), replace(LINK, record=model_record("cnn", signature=OTHER, app="digits")))
    assert "whose first registration fixed its signature" in own.message
    known = Catalog()
    for record in (app_record(), model_record()):
        known.apply(key_of(record), encode(record))
    for model, metric, alike in (("cnn", "f1", False), ("cnn", "top5", True), ("mlp", "f1", True)):
        link = replace(LINK, record=model_record(model, "2", app="digits", metric=metric))
        if alike:
            assert changed(app_record(), link, known).links[model] == "2"
        else:
            error = refused(app_record(), link, known)
            assert error.message.startswith("metric: is f1, and that of model mlp, which app digits links, is top1, so")


def test_one_score_never_means_two_classes() -> None:
    known, named = Catalog(), model_record(labels=["cat", "dog"])
    for record in (app_record(), named):
        known.apply(key_of(record), encode(record))
    for model, labels, alike in (
        ("cnn", ["dog", "cat"], False),
        ("cnn", ["cat"], False),
        ("cnn", ["cat", "dog"], True),
        ("cnn", [], True),
        ("mlp", ["dog", "cat"], True),
    ):
        link = replace(LINK, record=model_record(model, "2", app="digits", labels=labels))
        if alike:
            assert changed(app_record(), link, known).links[model] == "2"
        else:
            text = refused(app_record(), link, known).message
            assert re.search(r"labels: a class is \w+, which is \w+ in model mlp, .*: give both the same", text), text


def test_only_registrations_make_apps_and_links_name_the_newest_version() -> None:
    assert refused(None, LINK).code == "unknown_app"
    assert refused(None, UnlinkModel(app="digits", model="mlp")).code == "unknown_app"
    known = Catalog()
    for record in (app_record(), model_record()):
        known.apply(key_of(record), encode(record))
    gone = refused(None, UnlinkModel(app="digts", model="mlp"), known)
    assert (
        told(gone, "digts", known).message == "app: there is no app digts: see infaas.list.apps; did you mean digits?"
    )
    other = refused(app_record(), UnlinkModel(app="digits", model="mpl"), known)
    assert other.message == "model: app digits does not link mpl; it links mlp"
    unknown = refusal(SetBatching(model="mpl", policy="edf"), known)
    assert unknown.message == "model: there is no model mpl; did you mean mlp?"
    assert refused(None, DeleteApp(app="digits")).code == "unknown_app"
    known = catalog()
    assert refused(app_record(), SetVersion(app="digits", model="far", version="1"), known).code == "unknown_model"
    missing = refused(app_record(), SetVersion(app="digits", model="mlp", version="7"), known)
    assert (missing.code, "1, 2" in missing.message) == ("unknown_model", True)
    assert changed(app_record(), SetVersion(app="digits", model="mlp", version="2"), known).links == {"mlp": "2"}
    app, known = app_record("a", links={}), catalog()
    assert changed(app, LinkModel(app="a", model="mlp"), known).links == {"mlp": "2"}
    first = changed(app, LinkModel(app="a", model="mlp", version="1", latency_ms=3.0, default_output=[0]), known)
    assert (first.links, first.latency_ms, first.default_output) == ({"mlp": "1"}, 3.0, [0])
    assert refused(app, LinkModel(app="a", model="none"), known).code == "unknown_model"


def test_apps_are_unlinked_deleted_and_get_other_settings() -> None:
    assert changed(app_record(), UnlinkModel(app="digits", model="mlp")).links == {}
    assert refused(app_record(), UnlinkModel(app="digits", model="cnn")).code == "unknown_model"
    assert amend(app_record(), DeleteApp(app="digits"), Catalog()) is None
    assert changed(None, AddApp(app="a", min_instances=0, slo_target=0.9)) == AppRecord(
        app="a", links={}, min_instances=0, slo_target=0.9
    )
    assert refused(app_record(), AddApp(app="digits")).code == "bad_request"
    before = app_record(latency_ms=5.0, default_output=[0], min_instances=3)
    assert changed(before, SetApp(app="digits", default_output="none")) == replace(before, default_output="none")
    assert changed(before, SetApp(app="digits", min_instances=0)) == replace(before, min_instances=0)
    assert changed(before, SetApp(app="digits", slo_target=0.95)) == replace(before, slo_target=0.95)
    any_variant = changed(before, SetApp(app="digits", accuracy="any"))
    assert any_variant == replace(before, accuracy="any")
    assert changed(any_variant, SetApp(app="digits", latency_ms=5.0)).accuracy == "any"
    assert changed(any_variant, SetApp(app="digits", accuracy="own")) == before
    assert refused(None, SetApp(app="digits", latency_ms=1.0)).code == "unknown_app"


BOTH = app_record(links={"mlp": "1", "cnn": "1"})
EXP4 = Ensemble(policy="exp4", members=["mlp"])


def test_a_selection_is_set_and_ends() -> None:
    everybody = SetSelection(app="digits", policy="exp3")
    assert changed(BOTH, everybody) == replace(BOTH, selection=Ensemble(policy="exp3"))
    after = changed(BOTH, SetSelection(app="digits", policy="exp4", members=["mlp"]))
    assert after == replace(BOTH, selection=EXP4)
    assert changed(after, SetSelection(app="digits")) == BOTH
    assert changed(after, SetApp(app="digits", latency_ms=3.0)).selection == EXP4
    assert refused(None, everybody).code == "unknown_app"


def test_members_must_be_linked_and_no_app_is_its_own() -> None:
    error = refused(BOTH, SetSelection(app="digits", policy="exp4", members=["cnn", "svm"]))
    assert error.code == "unknown_model"
    assert error.message == (
        "members: app digits does not link svm; it links cnn, mlp: use link-model first, or name those"
    )
    error = refused(BOTH, SetSelection(app="digits", policy="exp4", members=["digits"]))
    assert error.code == "unknown_model"
    assert error.message.startswith("members: app digits does not link digits; it links cnn, mlp")


def test_a_named_member_cannot_be_unlinked() -> None:
    named = replace(BOTH, selection=EXP4)
    error = refused(named, UnlinkModel(app="digits", model="mlp"))
    assert error.code == "bad_request"
    assert error.message.startswith("model: mlp is a member of the selection of app digits; use set-selection without")
    assert changed(named, UnlinkModel(app="digits", model="cnn")).links == {"mlp": "1"}
    everybody = replace(BOTH, selection=Ensemble(policy="exp4"))
    assert changed(everybody, UnlinkModel(app="digits", model="mlp")).links == {"cnn": "1"}
    assert changed(named, replace(LINK, record=model_record("mlp", "2"))).selection == EXP4


def catalog() -> Catalog:
    return catalog_of(
        model_record(version="1", created=1.0),
        model_record(version="2", created=2.0),
        app_record("digits", links={}),
        VARIANT,
        AppRecord(app="pipe", links={}, pipeline=PipelineRecord(vertices=[])),
        *(model_record(name) for name in ("far", "own")),
        variant_record("far", model="far", format="remote"),
        variant_record("own", model="own", format="container"),
    )


def asked(verb: str, **fields: Any) -> AdminVerb | Error:
    request = verb_asked(verb, encode(fields))
    return request if isinstance(request, Error) else refusal(request, catalog()) or request


def test_each_verb_is_carried_out_and_a_selection_of_nothing_ends() -> None:
    place = RegistrarEdge(*(None for _ in range(7)))  # type: ignore[arg-type]
    assert set(ADMIN_VERBS.values()) - {DrainWorker} <= set(place._commands), "that goes to the worker"
    assert all(kind in place._commands for kind in AMENDMENTS)
    for fields in ({}, {"cache_mb": 0.0, "contextual": False, "policy": None}):
        ends = asked("set-selection", app="a", **fields)
        assert isinstance(ends, SetSelection)
        assert ends.selection is None
    assert SetSelection(app="a", cache_mb=64).selection == Ensemble(cache_mb=64)


def test_verbs_are_read_by_their_fields() -> None:
    assert asked("add-app", app="a", latency_ms=3.0) == AddApp(app="a", latency_ms=3.0)
    body = {"verb": "add-app", "app": "a", "more": 1}
    assert verb_asked("add-app", encode(body)) == AddApp(app="a"), "what no verb knows is not read"
    assert asked("delete-app", app="a") == DeleteApp(app="a")
    assert asked("unlink-model", app="a", model="mlp") == UnlinkModel(app="a", model="mlp")
    assert asked("link-model", app="a", model="mlp") == LinkModel(app="a", model="mlp")
    assert asked("set-version", app="a", model="mlp", version="1") == SetVersion(app="a", model="mlp", version="1")
    assert asked("set-app", app="a", accuracy="any", slo_target=0.95) == SetApp(
        app="a", accuracy="any", slo_target=0.95
    )
    assert asked("set-replicas", app="a", count=2, model=None) == SetReplicas(app="a", count=2)
    assert asked("set-target", app="a", slo_target=0.95) == SetTarget(app="a", slo_target=0.95)
    given: dict[str, Any] = {
        "policy": "exp3",
        "members": ["b", "c"],
        "eta": 1.0,
        "contextual": True,
        "confidence": 1.0,
        "wait_share": 1.0,
    }
    assert asked("set-selection", app="a", **given) == SetSelection(app="a", **given)
    assert asked("set-selection", app="a", policy="my.votes:Own_2") == SetSelection(app="a", policy="my.votes:Own_2")
    assert asked("reset-selection", app="a").code == "unknown_app"  # type: ignore[union-attr]
    for context in (None, "me"):
        assert asked("reset-selection", app="digits", context=context) == ResetSelection(app="digits", context=context)
    assert asked("delete-version", model="mlp", version="1") == DeleteVersion(model="mlp", version="1")
    assert asked("release-variant", variant="v", worker="w1") == ReleaseVariant(variant="v", worker="w1")


def test_a_rule_of_batching_is_for_one_app_model_or_variant() -> None:
    for scope, name in (("app", "digits"), ("model", "mlp"), ("variant", VARIANT.variant)):
        rule = asked("set-batching", **{scope: name}, policy="fixed", batch=VARIANT.max_batch)
        assert isinstance(rule, SetBatching)
        assert rule.scope == (scope, name)
        assert rule.rule == BatchingRule(policy="fixed", batch=VARIANT.max_batch)
    removed = asked("set-batching", variant=VARIANT.variant)
    assert isinstance(removed, SetBatching)
    assert removed.rule is None


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"policy": "aimd"}, "bad_request", "set-batching: name exactly one of app, model, variant"),
        ({"app": "digits", "model": "mlp", "policy": "aimd"}, "bad_request", "set-batching: name exactly one of"),
        ({"app": "a b", "policy": "aimd"}, "bad_request", "app: "),
        ({"app": "none", "policy": "aimd"}, "unknown_app", "app: there is no app none"),
        ({"model": "none", "policy": "aimd"}, "unknown_model", "model: there is no model none"),
        ({"variant": "none", "policy": "aimd"}, "bad_request", "variant: there is no variant none"),
        ({"model": "mlp", "policy": "best"}, "bad_request", "policy: 'best' is unknown; use one of edf"),
        ({"model": "mlp", "policy": "fixed"}, "bad_request", "batch: fixed needs it"),
        ({"model": "mlp", "batch": 8}, "bad_request", "batch: needs a policy"),
        (
            {"variant": VARIANT.variant, "policy": "fixed", "batch": VARIANT.max_batch + 1},
            "bad_request",
            f"batch: {VARIANT.variant} takes at most {VARIANT.max_batch} items",
        ),
    ],
)
def test_a_wrong_rule_of_batching_is_refused(fields: dict[str, Any], code: str, text: str) -> None:
    error = asked("set-batching", **fields)
    assert error.code == code
    assert error.message.startswith(text)


@pytest.mark.parametrize("verb", sorted(ADMIN_VERBS))
def test_missing_and_wrong_names_are_named(verb: str) -> None:
    fields = body_of(ADMIN_VERBS[verb])
    good = {name: "ok" for name, one in fields.items() if one.rule == TOKEN and one.default is NODEFAULT}
    values = {
        name: value for name, value in {"count": 1, "slo_target": 0.5, "qps": 1, "at": 1}.items() if name in fields
    }
    for field in good:
        for bad in (None, "a b", "*"):
            error = asked(verb, **{**values, **good, field: bad})
            assert error.code == "bad_request"
            assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize("verb", ADMIN_VERBS)
def test_each_number_beyond_its_bounds_is_refused(verb: str) -> None:
    """What the bounds are, the documents say that are written from the messages."""
    known = body_of(ADMIN_VERBS[verb])
    good = {"app": "a", "model": "mlp", "policy": "exp4", "slo_target": 0.9, "count": 1, "qps": 1, "at": 1}
    good = {"model": "mlp", "policy": "aimd"} if verb == "set-batching" else {k: good[k] for k in known if k in good}
    for field, one in known.items():
        if isinstance(one.rule, Number):
            more = [one.rule.most + 1] if one.rule.most < inf else []
            for wrong in (-1, *more, *((nan, inf) if one.type is float else ())):
                error = asked(verb, **{**good, field: [wrong] if one.type == list[float] else wrong})
                assert f"{field}: must be" in error.message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"policy": "exp5"}, "policy: must be one of exp3, exp4, majority"),
        ({"policy": "os:"}, "policy: must be"),
        ({"policy": "../os:System"}, "policy: must be"),
        ({"policy": f"{'m' * 200}:C"}, "policy: must be"),
        ({"policy": "exp4", "members": []}, "members: must name at least"),
        ({"policy": "exp4", "members": ["m", "m"]}, "members: must name each"),
        ({"policy": "exp4", "members": ["a b"]}, "members: must be 1 to 64"),
        ({"members": ["m"]}, "members: are asked by a policy only"),
        ({"policy": "exp4", "wait_share": 0.0}, "wait_share: must be above 0"),
        ({"cache_mb": 8.0, "confidence": 0.5}, "confidence: is read by a policy"),
        ({"cache_mb": 8.0, "eta": 0.5}, "eta: is read by a policy only"),
        ({"wait_share": 0.5}, "wait_share: is read by a policy only"),
        ({"contextual": True}, "contextual: is read by a policy only"),
        ({"policy": "majority", "eta": 0.5}, "eta: majority does not learn"),
        ({"policy": "m:C", "eta": 0.5}, "eta: m:C does not learn"),
        ({"policy": "weighted", "contextual": True}, "contextual: weighted"),
    ],
)
def test_a_wrong_selection_is_refused(fields: dict[str, Any], word: str) -> None:
    error = asked("set-selection", app="a", **fields)
    assert error.code == "bad_request"
    assert word in error.message


@pytest.mark.parametrize(
    ("verb", "fields", "word"),
    [
        ("frobnicate", {}, "link-model"),
        ("add-app", {"app": "a", "input_type": "words"}, "strings"),
        ("set-app", {"app": "a"}, "default_output"),
        ("set-replicas", {"app": "a"}, "count"),
        ("set-replicas", {"count": 2}, "app"),
        ("set-target", {"app": "a"}, "set-target: give at least one of slo_target, accuracy_mean, worth"),
        (
            "set-target",
            {"app": "a", "slo_traget": 0.9},
            "slo_traget: set-target does not read it; did you mean slo_target?",
        ),
        ("set-aap", {"app": "a"}, "deploy-pipeline; did you mean set-app?"),
        (
            "set-pipeline",
            {"pipeline": {"name": "p", "latncy_ms": 9}},
            "pipeline.latncy_ms: set-pipeline does not read it; did you mean latency_ms?",
        ),
        ("set-app", {"app": "a", "latncy_ms": 5}, "latncy_ms: set-app does not read it; did you mean latency_ms?"),
        ("set-target", {"app": "a", "slo_target": 0.0}, "slo_target: must be above 0 and below 1, not 0"),
        ("set-target", {"app": "a", "slo_target": 1.0}, "slo_target: must be above 0 and below 1, not 1"),
        ("set-target", {"app": "a", "slo_target": 0.9, "count": 2}, "count: set-target does not read it"),
        ("set-version", {"app": "a", "model": "mlp", "version": "1", "latency_ms": 2.0}, "latency_ms: set-"),
        ("set-batching", {"app": "pipe", "policy": "aimd"}, "app: pipe is a pipeline and forms no batches"),
        ("set-batching", {"app": "pipe"}, "app: pipe is a pipeline"),
        ("set-batching", {"variant": "far", "policy": "edf", "contexts": 4}, "contexts: far is a remote"),
        ("set-batching", {"model": "own", "policy": "edf", "contexts": 2}, "contexts: own is a container"),
        ("set-batching", {"model": "mlp", "policy": "fixed", "batch": 9}, "batch: mlp takes at most 8"),
    ],
)
def test_what_cannot_be_done_says_why(verb: str, fields: dict[str, Any], word: str) -> None:
    error = asked(verb, **fields)
    assert error.code == "bad_request"
    assert word in error.message


def test_models_that_are_not_there_are_told_with_the_remedy() -> None:
    for verb, fields, word in (
        ("set-replicas", {"model": "mlp", "count": 2}, "link-model"),
        ("delete-version", {"model": "mlp", "version": "7"}, "1, 2"),
    ):
        error = asked(verb, **fields)
        assert error.code == "unknown_model"
        assert word in error.message


def test_settings_are_taken_back() -> None:
    before = app_record(
        "a",
        latency_ms=5.0,
        default_output=[0],
        slo_target=0.9,
        accuracy_mean=0.8,
        worth=2.0,
        input_type="floats",
        min_instances=3,
    )
    for field, after in (
        ("latency_ms", None),
        ("default_output", None),
        ("slo_target", None),
        ("accuracy_mean", None),
        ("worth", None),
        ("input_type", None),
        ("min_instances", 1),
    ):
        change = asked("set-app", app="a", **{field: None})
        assert isinstance(change, SetApp)
        assert changed(before, change) == replace(before, **{field: after})
    target = asked("set-target", app="a", slo_target=None)
    assert isinstance(target, SetTarget)
    assert changed(before, target) == replace(before, slo_target=None)
    assert changed(before, asked("set-target", app="a", accuracy_mean=0.9, worth=None)) == replace(
        before, accuracy_mean=0.9, worth=None
    )
    pipe = app_record("pipe", links={}, pipeline=PipelineRecord(vertices=[]), latency_ms=5.0, min_instances=0)
    for field in ("latency_ms", "min_instances"):
        assert refused(pipe, SetApp(app="pipe", **{field: None})).message.startswith(f"{field}: pipe is a pipeline")


def test_replicas_last_until_they_are_none_or_the_model_is_unlinked() -> None:
    four = changed(app_record("a"), SetReplicas(app="a", model="mlp", count=4))
    assert four.replicas == {"mlp": 4}
    assert changed(four, SetReplicas(app="a", model="mlp", count=0)).replicas == {}
    assert changed(four, UnlinkModel(app="a", model="mlp")).replicas == {}
    assert refused(app_record("a"), SetReplicas(app="a", model="cnn", count=4)).code == "unknown_model"
    of_app = changed(four, SetReplicas(app="a", count=2))
    assert (of_app.min_instances, of_app.replicas) == (2, {"mlp": 4})


def test_what_is_expected_is_kept_by_its_time_and_taken_back_by_a_rate_of_zero() -> None:
    once, weekly = Expect(app="digits", qps=20.0, at=900.0), Expect(app="digits", qps=5.0, at=300.0, weekly=True)
    both = changed(changed(app_record(), once), weekly)
    assert both.expects == [Expectation(300.0, 5.0, True), Expectation(900.0, 20.0)]
    assert changed(both, replace(once, qps=30.0)).expects[1].qps == 30.0
    assert changed(both, replace(weekly, qps=0.0)).expects == [Expectation(900.0, 20.0)]
    assert "nothing was said" in refused(app_record(), replace(once, qps=0.0)).message


def test_expected_load_is_a_floor_from_its_lead_time_on_and_for_a_quarter_of_an_hour() -> None:
    app = replace(app_record(), expects=[Expectation(10_000.0, 7.0), Expectation(5_000.0, 3.0, weekly=True)])
    week = 7 * 86_400.0
    seen = {
        now: expected_qps(app, now, 60.0)
        for now in (9_900.0, 9_950.0, 10_800.0, 11_000.0, week + 4_970.0, week + 6_000.0)
    }
    assert list(seen.values()) == [0.0, 7.0, 7.0, 0.0, 3.0, 0.0]
