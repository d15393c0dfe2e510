"""Operators' verbs: what `infaas.admin.<verb>` takes. A verb is stated here, by the name of its message; all doors read it from here.

The registrar checks a request by its annotations (bus/fields.py) and carries the same message out; `infaas admin` makes its options of
the fields, the gateway reads its bodies by them, and the documents describe them. A body need not name the verb: its subject does.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from msgspec import NODEFAULT, UNSET, Struct, UnsetType

from bus.fields import PART, SHARE, TARGET, TOKEN, Checked, Fault, Field, Number, choice, fields_of
from bus.messages.catalog import BatchingFields, BatchingRule, Ensemble, Outputs, PipelineRecord

POSITIVE = Number(above=0)
INPUT_TYPES = ("integers", "floats", "doubles", "bytes", "strings")
OBJECTIVE = "The app's latency objective, in milliseconds."
DEFAULT_OUTPUT = (
    "What the app answers if no model can answer in time, as JSON. A text that is no JSON stands for itself."
)
IN_TIME = "The share of the app's queries to be answered in time, above 0 and below 1."
ACCURACY_MEAN = "The accuracy, above 0 and at most 1, that the app's answers have in the mean, at least cost. A query's own need still holds."
WORTH = "US$ per 1,000 answers that a point (0.01) of accuracy more is worth."
NO_OBJECTIVE = "The app has no latency objective any more (set-app)."
NO_DEFAULT = "The app has no default output any more (set-app)."
NO_TARGET = (
    "The app has no target of its own any more, but autoscaler.slo_target of the settings (set-app, set-target)."
)

NO_MEAN = "The app has no mean accuracy of its own any more, but autoscaler.accuracy_mean of the settings."
NO_WORTH = "The app states no worth of accuracy any more; autoscaler.worth of the settings holds."


def spelled(name: str) -> str:
    """The verb of a message: `SetReplicas` is `set-replicas`."""
    return re.sub(r"\B(?=[A-Z])", "-", name).lower()


class AdminVerb(Checked, frozen=True, kw_only=True, omit_defaults=True, tag=spelled, tag_field="verb"):
    """An operator's request. one_of: fields of which exactly one is given. taken_back: fields that null takes back, and what that means.

    noun: what it changes, by which the command line groups it: `infaas app add` is `add-app`.
    """

    noun: ClassVar[str] = "app"
    one_of: ClassVar[tuple[str, ...]] = ()
    taken_back: ClassVar[dict[str, str]] = {}

    def conflicts(self) -> Iterator[Fault]:
        if self.one_of and sum(getattr(self, name) is not None for name in self.one_of) != 1:
            yield Fault(verb_of(type(self)), f"name exactly one of {', '.join(self.one_of)}")


TARGETS_BACK = {"slo_target": NO_TARGET, "accuracy_mean": NO_MEAN, "worth": NO_WORTH}


class AppSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of an app. What is UNSET stays as it is, what is None has its default again."""

    latency_ms: Annotated[float | UnsetType | None, POSITIVE, OBJECTIVE] = UNSET
    default_output: Annotated[Any, DEFAULT_OUTPUT] = UNSET
    min_instances: Annotated[int | UnsetType | None, Number(), "Instances that the app always keeps."] = UNSET
    slo_target: Annotated[float | UnsetType | None, TARGET, IN_TIME] = UNSET
    accuracy_mean: Annotated[float | UnsetType | None, PART, ACCURACY_MEAN] = UNSET
    worth: Annotated[float | UnsetType | None, Number(), WORTH] = UNSET
    accuracy: Annotated[
        str | UnsetType | None,
        choice("own", "any"),
        "What a query gets that states no accuracy: own, a variant at most 0.5 points below its model (the default), or any.",
    ] = UNSET
    quality_act: Annotated[
        str | UnsetType | None,
        choice("report", "select", "refuse"),
        "What a query gets whose accuracy no variant reaches any more, by the labels: report, the same variant as before; select, the best that"
        " there is (the default); or refuse. The first two say what they miss.",
    ] = UNSET
    payloads: Annotated[
        float | UnsetType | None,
        SHARE,
        "Share of the app's queries that are kept with their answers, for `infaas payloads` and `infaas remeasure`, 0 to 1. Default: 0, none.",
    ] = UNSET
    input_type: Annotated[
        str | UnsetType | None,
        choice(*INPUT_TYPES),
        f"Type of an item of the app's inputs: {', '.join(INPUT_TYPES[:-1])} or {INPUT_TYPES[-1]}.",
    ] = UNSET

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are to change."""
        values = {name: getattr(self, name) for name in AppSettings.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}


App = Annotated[str, TOKEN, "Name of the app."]
AppOrNone = Annotated[str | None, TOKEN, "Name of the app."]
Model = Annotated[str, TOKEN, "Name of the model."]
ModelOrNone = Annotated[str | None, TOKEN, "Name of the model."]
VERSION = "Version of the model. link-model takes the newest by default."
Version = Annotated[str, TOKEN, VERSION]


class AddApp(AppSettings, AdminVerb, frozen=True, kw_only=True):
    """Make an app without models. Its first model fixes its inputs and outputs."""

    app: App


class SetApp(AppSettings, AdminVerb, frozen=True, kw_only=True):
    """Change settings of an app."""

    taken_back = {"latency_ms": NO_OBJECTIVE, "default_output": NO_DEFAULT, **TARGETS_BACK}

    app: App

    def conflicts(self) -> Iterator[Fault]:
        if not self.given:
            yield Fault("set-app", f"give at least one of {', '.join(AppSettings.__struct_fields__)}")


class DeleteApp(AdminVerb, frozen=True, kw_only=True):
    """Delete an app. Its models stay, for other apps and for queries by model."""

    app: App


class LinkModel(AdminVerb, frozen=True, kw_only=True):
    """Let an app serve a model."""

    noun = "model"

    app: App
    model: Model
    version: Annotated[str | None, TOKEN, VERSION] = None
    latency_ms: Annotated[float | None, POSITIVE, OBJECTIVE] = None
    default_output: Annotated[Any, DEFAULT_OUTPUT] = None


class UnlinkModel(AdminVerb, frozen=True, kw_only=True):
    """Stop an app from serving a model."""

    noun = "model"

    app: App
    model: Model


class SetVersion(AdminVerb, frozen=True, kw_only=True):
    """Let an app serve another version of a model that it links, a newer or an older one."""

    noun = "model"

    app: App
    model: Model
    version: Version


class StartRelease(AdminVerb, frozen=True, kw_only=True):
    """Let an app answer a growing share of its queries by a new version of a model, for as long as that is not shown to be worse than the old one."""

    noun = "release"

    app: App
    model: Model
    version: Annotated[str | None, TOKEN, "The new version. Default: the newest that fits the app."] = None
    steps: Annotated[
        list[float],
        Number(above=0, below=1),
        "Shares of the queries that get it in turn, growing, each above 0 and below 1. Default: 0.01,0.1,0.5.",
    ] = []
    least: Annotated[float, Number(most=30 * 86400), "Seconds that a step takes at least. Default: 300."] = 300.0
    margin: Annotated[float, SHARE, "Loss of accuracy that counts as none, 0 to 1. Default: 0.005."] = 0.005
    prove: Annotated[
        bool, "Go on to the next step only once labels exclude that it is worse by more than the margin."
    ] = False
    hold: Annotated[bool, "Stay at the last step: an A/B test that `infaas release show` reports on."] = False
    mirror: Annotated[
        float,
        SHARE,
        "Before the first step, let the new version answer this share of the queries once more, on idle capacity, for comparison alone. With `hold` and"
        " without `steps` it stays at that. Default: 0, none.",
    ] = 0.0

    def conflicts(self) -> Iterator[Fault]:
        if sorted(set(self.steps)) != self.steps:
            yield Fault("steps", "must grow from step to step: give shares such as 0.01,0.1,0.5")


class PauseRelease(AdminVerb, frozen=True, kw_only=True):
    """Keep an app's release in its step. It still goes back if the new version is shown to be worse."""

    noun = "release"

    app: App
    resume: Annotated[bool, "It goes on (pause-release)."] = False


class PromoteRelease(AdminVerb, frozen=True, kw_only=True):
    """End an app's release: the new version gets all queries."""

    noun = "release"

    app: App


class AbortRelease(AdminVerb, frozen=True, kw_only=True):
    """End an app's release: the old version gets all queries."""

    noun = "release"

    app: App


class SetReplicas(AdminVerb, frozen=True, kw_only=True):
    """Keep at least so many instances of an app, of a model in an app, or of a model in all apps that link it."""

    count: Annotated[
        int,
        Number(),
        "Instances that the app always keeps, or of the model's best variant in this app or in all apps that link it (set-replicas).",
    ]
    app: AppOrNone = None
    model: ModelOrNone = None

    def conflicts(self) -> Iterator[Fault]:
        if self.app is None and self.model is None:
            yield Fault("app", "name the app, or the model, that keeps so many instances")


class SetTarget(AdminVerb, frozen=True, kw_only=True):
    """What an app is to reach: the share of its queries in time, and how accurate its answers are in the mean, or what accuracy is worth."""

    taken_back = TARGETS_BACK

    app: App
    slo_target: Annotated[float | UnsetType | None, TARGET, IN_TIME] = UNSET
    accuracy_mean: Annotated[float | UnsetType | None, PART, ACCURACY_MEAN] = UNSET
    worth: Annotated[float | UnsetType | None, Number(), WORTH] = UNSET

    @property
    def given(self) -> dict[str, float | None]:
        """The targets that are to change."""
        values = {name: getattr(self, name) for name in TARGETS_BACK}
        return {name: value for name, value in values.items() if value is not UNSET}

    def conflicts(self) -> Iterator[Fault]:
        if not self.given:
            yield Fault("set-target", f"give at least one of {', '.join(TARGETS_BACK)}")


class Expect(AdminVerb, frozen=True, kw_only=True):
    """Say what load an app is to expect: it finds capacity by then, which is kept for a quarter of an hour."""

    app: App
    qps: Annotated[float, Number(most=1e9), "Queries per second; 0 takes back what was said for that time (expect)."]
    at: Annotated[float, POSITIVE, "When, in Unix seconds (expect)."]
    weekly: Annotated[bool, "Every seven days (expect)."] = False


class SetSelection(Ensemble, AdminVerb, frozen=True, kw_only=True):
    """How several models of an app answer a query together.

    What is left out has its default, not the value before; without a policy and a cache it ends, and one variant answers.
    """

    app: App

    @property
    def selection(self) -> Ensemble | None:
        """The selection that is asked for. None: it ends."""
        fields = {name: getattr(self, name) for name in Ensemble.__struct_fields__}
        return Ensemble(**fields) if self.policy is not None or self.cache_mb else None


class ResetSelection(AdminVerb, frozen=True, kw_only=True):
    """Forget what feedback has taught."""

    app: App
    context: Annotated[str | None, "Forget only what was learnt in this context (reset-selection)."] = None


class DeleteVersion(AdminVerb, frozen=True, kw_only=True):
    """Delete a version of a model that no app serves, and its variants. Its number is never used again."""

    noun = "model"

    model: Model
    version: Version


class Prune(AdminVerb, frozen=True, kw_only=True):
    """Delete the files that no registered version has, on NATS and on the workers. It is done after each deletion of a version and every night, too."""

    dry_run: Annotated[bool, "Only say how much that would be."] = False


class DrainWorker(AdminVerb, frozen=True, kw_only=True, tag="drain"):
    """Give a worker no new work: it answers what it has, others load its models. `infaas workers` says when nothing is left."""

    noun = "worker"

    worker: Annotated[str, TOKEN, "The worker."]
    resume: Annotated[bool, "It takes work again (drain)."] = False


class ReleaseVariant(AdminVerb, frozen=True, kw_only=True):
    """End a variant's quarantine."""

    noun = "model"

    variant: Annotated[str, TOKEN, "The quarantined variant that may be loaded again."]
    worker: Annotated[str | None, TOKEN, "Release the variant on this worker only (release-variant)."] = None


class SetBatching(BatchingFields, AdminVerb, frozen=True, kw_only=True):
    """How batches of an app, a model or a variant are formed. Without a policy, the rule is removed."""

    one_of = ("app", "model", "variant")  # from the widest to the narrowest, which counts

    app: AppOrNone = None
    model: ModelOrNone = None
    variant: Annotated[str | None, TOKEN, "The one whose batches the rule is for."] = None
    policy: Annotated[str | None, "How batches are formed: edf, fixed, aimd, quantile, delayed or threshold."] = None

    @property
    def scope(self) -> tuple[str, str]:
        """What the rule is for: app, model or variant, and its name."""
        return next((name, getattr(self, name)) for name in self.one_of if getattr(self, name) is not None)

    @property
    def rule(self) -> BatchingRule | None:
        """The rule that is asked for. None: it is removed."""
        fields = {name: getattr(self, name) for name in BatchingFields.__struct_fields__}
        return None if self.policy is None else BatchingRule(policy=self.policy, **fields)


class PipelineHead(Struct, frozen=True, kw_only=True):
    """What a pipeline is as an app. latency_ms: its objective, from its query to its answer. slo_target: as of any app; None: as it is."""

    name: Annotated[str, TOKEN]
    latency_ms: Annotated[float, POSITIVE]
    slo_target: Annotated[float | None, TARGET] = None


class SetPipeline(PipelineRecord, AdminVerb, frozen=True, kw_only=True):
    """A graph of apps that answers the queries of one, which is made if it is not there: the content of a pipeline's file."""

    noun = "pipeline"

    pipeline: Annotated[PipelineHead, "Its name and latency_ms: [pipeline] in the file."]
    output: Outputs
    plan: Annotated[Any, "How to plan it, which only its file needs."] = None

    @property
    def app(self) -> str:
        """The app that it is."""
        return self.pipeline.name

    @property
    def graph(self) -> PipelineRecord:
        """The graph alone, as an app's record has it."""
        return PipelineRecord(vertices=self.vertices, edges=self.edges, output=self.output)


class DeployPipeline(AdminVerb, frozen=True, kw_only=True):
    """Serve a pipeline by a plan; without one, as any other app."""

    noun = "pipeline"

    app: App
    plan: Annotated[
        dict[str, Any] | None, "What `infaas pipeline plan --json` prints. Null: the deployed one ends."
    ] = None


ADMIN_VERBS: dict[str, type[AdminVerb]] = {
    str(one.__struct_config__.tag): one
    for one in (
        AddApp,
        SetApp,
        DeleteApp,
        LinkModel,
        UnlinkModel,
        SetVersion,
        StartRelease,
        PauseRelease,
        PromoteRelease,
        AbortRelease,
        SetReplicas,
        SetTarget,
        Expect,
        SetSelection,
        ResetSelection,
        DeleteVersion,
        Prune,
        DrainWorker,
        ReleaseVariant,
        SetBatching,
        SetPipeline,
        DeployPipeline,
    )
}


def verb_of(request: type[AdminVerb]) -> str:
    """The name of a verb."""
    return str(request.__struct_config__.tag)


def body_of(request: type[AdminVerb]) -> dict[str, Field]:
    """The fields of a verb by the names that they have in a body: what it needs first, then those of which one must be given."""
    found = dict(zip(request.__struct_encode_fields__, fields_of(request).values(), strict=True))
    return dict(sorted(found.items(), key=lambda one: (one[1].default is not NODEFAULT, one[0] not in request.one_of)))
