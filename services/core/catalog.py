"""The catalogue in memory, built from the bucket's entries. Dispatchers base decisions on it. Registrars check registrations against it.

The bucket's keys are `app.<app>`, `model.<model>.<version>`, `variant.<variant>` and `quality.<app>`. The values are the MessagePack maps of the
records in `bus.messages.catalog`. Writers put variants first, then the model, then the app's link. Variants stay invisible until their
model exists, so that no reader sees an incomplete registration.

What labels say of an app's variants is part of its variants as the app sees them (`Catalog.seen`), the one place where a live accuracy takes the
registered one's.

Beside it: the replicas that the leading VM-autoscaler keeps for deployed pipelines, as it writes them into the control bucket.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.codec import decode_kept
from bus.fields import TYPO, meant
from bus.messages.catalog import TARGETS, AppRecord, ModelRecord, Signature, TensorSpec, VariantRecord
from bus.messages.public import Register
from bus.messages.quality import AppQuality, LiveAccuracy
from bus.messages.scaling import PipelineReplicas
from bus.subjects import WITHOUT_APP

_Record = TypeVar("_Record", AppRecord, ModelRecord, VariantRecord, AppQuality)
_KINDS = (AppRecord, ModelRecord, VariantRecord, AppQuality)
_DECODERS: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS}
# What has been read, by key and digest: all actors of a process follow the bucket, and hold its records once.
_READ: WeakValueDictionary[tuple[str, bytes], Any] = WeakValueDictionary()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
DEEPEST = 4  # pipelines within pipelines that are looked into
# What a system must not lose, in the order in which it is written back, so that nothing serves before it is whole: the ends of buckets'
# names, and how their keys begin.
LASTING = (
    ("selection", ""),
    ("control", "batching."),
    ("control", "quarantine."),
    ("status", "version."),
    ("status", "registration."),
    ("catalog", "variant."),
    ("catalog", "model."),
    ("catalog", "app."),
)
LASTING_BUCKETS = tuple(dict.fromkeys(bucket for bucket, _ in LASTING))


def lasting(bucket: str, key: str) -> int | None:
    """The place of a key in LASTING; None: it may be lost."""
    found = (place for place, (name, begin) in enumerate(LASTING) if name == bucket and key.startswith(begin))
    return next(found, None)


def app_key(app: str) -> str:
    return f"app.{app}"


def model_key(model: str, version: str) -> str:
    return f"model.{model}.{version}"


def quality_key(app: str) -> str:
    return f"quality.{app}"


def variant_key(variant: str) -> str:
    return f"variant.{variant}"


def selection_key(app: str, context: str | None) -> str:
    """The selection bucket's key of what is learnt about an app as a whole, or one of its contexts."""
    return f"{app}.{'_' if context is None else blake2b(context.encode(), digest_size=16).hexdigest()}"


def counted_key(key: str) -> str:
    """The selection bucket's key of the feedbacks that have counted in a context, beside its own key."""
    return f"{key}.counted"


def key_of(record: AppRecord | ModelRecord | VariantRecord | AppQuality) -> str:
    """The bucket's key of a record."""
    if isinstance(record, AppQuality):
        return quality_key(record.app)
    if isinstance(record, AppRecord):
        return app_key(record.app)
    if isinstance(record, ModelRecord):
        return model_key(record.model, record.version)
    return variant_key(record.variant)


def target_of(app: AppRecord | None, default: float) -> float:
    """The share of an app's queries to be answered in time, above 0 and below 1. default: that of the settings."""
    return default if app is None or app.slo_target is None else app.slo_target


UNREAD = "the model's file cannot be read"  # so begins why a load failed that did not get to the model


def files_of(key: str, value: bytes) -> set[str]:
    """The objects of the artifacts bucket that an entry of the catalogue bucket needs."""
    if key.startswith(variant_key("")) and (variant := decode_kept(VariantRecord, value)) is not None:
        return {variant.artifact, variant.distribution} - {""}
    if key.startswith("model.") and (model := decode_kept(ModelRecord, value)) is not None:
        return {model.source, model.validation} - {""}
    return set()


def accuracy_of(app: AppRecord | None, mean: float, worth: float) -> tuple[float, float]:
    """The accuracy that an app's answers have in the mean, and what a point of it more is worth, US$ per 1,000. 0: none. mean, worth: of the
    settings.
    """
    if app is None:
        return mean, worth
    return (
        mean if app.accuracy_mean is None else app.accuracy_mean,
        worth if app.worth is None else app.worth,
    )


class Catalog:
    """Apps, models by version, and variants, from the last entries of the bucket. Look-ups are dictionary accesses.

    unreadable: keys whose value could not be decoded, each with the reason. Such an entry counts as absent.
    """

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}
        self._apps: dict[str, AppRecord] = {}
        self._models: dict[str, dict[str, ModelRecord]] = {}
        self._variants: dict[str, VariantRecord] = {}
        self._of_version: dict[tuple[str, str], dict[str, VariantRecord]] = {}
        self._linking: dict[str, set[str]] = {}  # model -> apps that link it
        self._of_app: dict[str, tuple[VariantRecord, ...]] = {}  # the cache of `variants_of`
        self._planned: dict[str, tuple[str, ...]] | None = None  # the cache of `planned`
        self._quality: dict[str, AppQuality] = {}

    # -- fold

    def apply(self, key: str, value: bytes | None) -> set[str]:
        """Apply one entry of the bucket (value None: deleted). Returns the apps whose record or variants this changes."""
        kind, _, name = key.partition(".")
        self.unreadable.pop(key, None)
        if kind == "app":
            return self._app(name, self._read(key, value, AppRecord))
        if kind == "model":
            return self._model(name, self._read(key, value, ModelRecord))
        if kind == "variant":
            return self._variant(name, self._read(key, value, VariantRecord))
        if kind == "quality":
            return self._labelled(name, self._read(key, value, AppQuality))
        return set()

    def _read(self, key: str, value: bytes | None, record: type[_Record]) -> _Record | None:
        if value is None:
            return None
        of = key, blake2b(value, digest_size=16).digest()
        found: _Record | None = _READ.get(of)
        if found is not None:
            return found
        try:
            found = _DECODERS[record].decode(value)
        except _UNREADABLE as error:
            self.unreadable[key] = str(error)
            return None
        if key_of(found) != key:
            self.unreadable[key] = f"holds the record of {key_of(found)}"
            return None
        _READ[of] = found
        return found

    def _app(self, app: str, record: AppRecord | None) -> set[str]:
        old = self._apps.pop(app, None)
        self._planned = None
        for model in old.links if old is not None else ():
            self._linking[model].discard(app)
            if not self._linking[model]:
                del self._linking[model]
        self._of_app.pop(app, None)
        if record is not None:
            self._apps[app] = record
            for model in record.links:
                self._linking.setdefault(model, set()).add(app)
        return {app} if old is not None or record is not None else set()

    def _model(self, name: str, record: ModelRecord | None) -> set[str]:
        model, _, version = name.partition(".")
        if record is not None:
            self._models.setdefault(model, {})[version] = record
        elif version in self._models.get(model, ()):
            del self._models[model][version]
            if not self._models[model]:  # nobody means what is gone
                del self._models[model]
        return self._stale(model, version)

    def _variant(self, variant: str, record: VariantRecord | None) -> set[str]:
        affected: set[str] = set()
        old = self._variants.pop(variant, None)
        if old is not None:
            of = self._of_version[old.model, old.version]
            del of[variant]
            if not of:
                del self._of_version[old.model, old.version]
            affected |= self._stale(old.model, old.version)
        if record is not None:
            self._variants[variant] = record
            self._of_version.setdefault((record.model, record.version), {})[variant] = record
            affected |= self._stale(record.model, record.version)
        return affected

    def _labelled(self, app: str, record: AppQuality | None) -> set[str]:
        """The app, if another accuracy counts for one of its variants now."""
        before = self._truths(app)
        self._quality.pop(app, None)
        if record is not None:
            self._quality[app] = record
        self._of_app.pop(app, None)
        return {app} if app in self._apps and before != self._truths(app) else set()

    def _truths(self, app: str) -> dict[str, tuple[float, float]]:
        """By variant, as exactly as decisions need it: the views of an app are made anew when it changes."""
        known = ((one.variant, one.truth) for one in self.variants_of(app))
        return {name: (round(one.accuracy, 3), round(one.high, 2)) for name, one in known if one is not None}

    def _stale(self, model: str, version: str) -> set[str]:
        """The apps that queries may get this version of. Their cached variants are dropped, and collected again at the next look-up."""
        there = version in self._models.get(model, ())  # then queries may name it, whatever serves
        apps = {app for app in self._linking.get(model, ()) if there or self._apps[app].serves(model, version)}
        for app in apps:
            self._of_app.pop(app, None)
        return apps

    # -- look-ups

    def quality(self, app: str) -> AppQuality | None:
        """What labels say of an app; None: there are none."""
        return self._quality.get(app)

    def seen(self, app: str, records: Iterable[VariantRecord]) -> tuple[VariantRecord, ...]:
        """Variants as an app sees them: with what its labels say of each. Where that has left what was registered it is their accuracy, unless the
        app only reports it.
        """
        found, record = self._quality.get(app), self._apps.get(app)
        if found is None or record is None:
            return tuple(records)
        return tuple(
            one if one.variant not in found.variants else _seen(one, found.variants[one.variant], record.quality_act)
            for one in records
        )

    def app(self, name: str) -> AppRecord | None:
        return self._apps.get(name)

    def meant_app(self, name: str) -> str:
        """Of an unknown app: see `meant`."""
        return meant(name, self._apps, TYPO)

    def meant_model(self, name: str) -> str:
        """Of an unknown model: see `meant`."""
        return meant(name, self._models, TYPO)

    def no_app(self, name: str) -> str:
        """Why nobody answers for an app that is not there."""
        return f"no app {name!r}: see infaas.list.apps, or register a model for it{self.meant_app(name)}"

    def model(self, name: str, version: str | None = None) -> ModelRecord | None:
        """One version of a model. Without a version, the one registered last that is not held for a release."""
        versions = self._models.get(name)
        if not versions:
            return None
        if version is not None:
            return versions.get(version)
        return max(versions.values(), key=lambda one: (not self._holds(one), one.created, one.version))

    def _holds(self, record: ModelRecord) -> bool:
        linking = self._linking.get(record.model, ())
        return record.held and all(self._apps[app].links[record.model] != record.version for app in linking)

    def variant(self, name: str) -> VariantRecord | None:
        return self._variants.get(name)

    def variants_of(self, app: str) -> tuple[VariantRecord, ...]:
        """All variants of an app's models as it sees them, each model in the version that serves now. Empty for an unknown app.

        It returns the same tuple until the variants change.
        """
        found = self._of_app.get(app)
        if found is None:
            record = self._apps.get(app)
            if record is None:
                return ()
            links = sorted(record.links.items())
            single = [variant for link in links for variant in self.variants_at(*link)]
            found = self.seen(
                app, single + [one for one in self.cascades_of(record) if record.links.items() >= set(one.versions)]
            )
            self._of_app[app] = found
        return found

    def variants_at(self, model: str, version: str) -> tuple[VariantRecord, ...]:
        """The variants of one version of a model alone, in order of their names. Empty until the record of the model exists."""
        return tuple(one for one in self._at(model, version) if one.cascade is None)

    def cascades_of(self, app: AppRecord) -> list[VariantRecord]:
        """The variants of several models that an app links, in whatever versions. They are of the app; none of its models has them."""
        return [
            one
            for model in sorted(app.links)
            for version in sorted(self._models.get(model, ()))
            for one in self._at(model, version)
            if one.cascade is not None
            and all(name in app.links and at in self._models.get(name, ()) for name, at in one.versions)
        ]

    def _at(self, model: str, version: str) -> list[VariantRecord]:
        known = self._of_version.get((model, version), {}) if version in self._models.get(model, ()) else {}
        return [one for _, one in sorted(known.items())]

    def arms(self, app: AppRecord) -> list[tuple[VariantRecord, ...]]:
        """The variants of the old and of the new version in an app's release: one of each stays loaded. Empty: none is under way."""
        new = app.releasing
        return [] if new is None else [self.variants_at(new.model, one) for one in (new.old_version, new.version)]

    def versions(self, model: str) -> dict[str, ModelRecord]:
        """All registered versions of a model."""
        return dict(self._models.get(model, {}))

    def misfit(self, app: AppRecord, version: ModelRecord) -> str | None:
        """How a version differs from what an app answers with; None: the app may answer with it.

        Inputs and outputs must be the app's. A version that was made for another app must also have the classes and the metric of one
        that the app serves; if it serves none, of the last one that was made for it.
        """
        difference = None if app.signature is None else signature_difference(app.signature, version.signature)
        if difference is not None or version.app == app.app:
            return difference
        linked = [one for link in sorted(app.links.items()) if (one := self.model(*link)) is not None]
        made = (one for one in self.models if one.app == app.app)
        own = linked or sorted(made, key=lambda one: (one.created, one.version))[-1:]
        differences = [_meaning_difference(one, version) for one in own]
        return None if None in differences else next(iter(differences), None)

    def versions_for(self, app: AppRecord, model: str) -> dict[str, ModelRecord]:
        """The versions of a model that an app may answer with: the one that serves, and those that fit. Without an app, all."""
        return {
            name: record
            for name, record in self._models.get(model, {}).items()
            if app.app == WITHOUT_APP or app.links.get(model) == name or self.misfit(app, record) is None
        }

    def classes_of(self, app: AppRecord, depth: int = 0) -> list[str]:
        """The names of an app's classes, in the order of its scores: of its models, or of the stage that gives a pipeline's answer.

        Empty where there are none, or models differ.
        """
        if app.pipeline is None:
            found = [one.labels for link in app.links.items() if (one := self.model(*link)) is not None]
            return found[0] if found and all(labels == found[0] for labels in found) else []
        made = {vertex.name: vertex.app for vertex in app.pipeline.vertices}
        for text in app.pipeline.output.values():
            stage = self.app(made.get(text.partition("|")[0].partition(".")[0].strip(), ""))
            if stage is not None and depth < DEEPEST and (labels := self.classes_of(stage, depth + 1)):
                return labels
        return []

    def apps_linking(self, model: str) -> frozenset[str]:
        """The apps that link any version of this model."""
        return frozenset(self._linking.get(model, ()))

    @property
    def planned(self) -> Mapping[str, tuple[str, ...]]:
        """The variants that serve vertices of deployed pipelines, each with those pipelines, by name. They pay for its instances, and the
        leading VM-autoscaler alone gives these up.
        """
        if self._planned is None:
            self._planned = {}
            for name in sorted(self._apps):
                plan = self._apps[name].plan
                for variant in {} if plan is None else dict.fromkeys(one.variant for one in plan.vertices.values()):
                    self._planned[variant] = (*self._planned.get(variant, ()), name)
        return self._planned

    @property
    def apps(self) -> Iterable[AppRecord]:
        return self._apps.values()

    @property
    def models(self) -> Iterable[ModelRecord]:
        return (record for versions in self._models.values() for record in versions.values())

    @property
    def variants(self) -> Iterable[VariantRecord]:
        return self._variants.values()


def _seen(record: VariantRecord, live: LiveAccuracy, act: str) -> VariantRecord:
    own = replace(record, accuracy=record.measured, live=live, registered=record.measured)
    return own if act == "report" or own.truth is None else replace(own, accuracy=live.accuracy)


class ContextLabels(Struct, frozen=True, eq=False):
    """What labels of one context say of an app's variants, by name, where that counts in place of what the app's say. best: the most accurate, by model."""

    variants: Mapping[str, LiveAccuracy]
    best: Mapping[str, float]

    def seen(self, records: Iterable[VariantRecord], act: str) -> tuple[VariantRecord, ...]:
        """An app's variants, for a query with this context. act: the app's `quality_act`."""
        return tuple(
            one if (live := self.variants.get(one.variant)) is None else _seen(one, live, act) for one in records
        )


def labels_of(
    records: Iterable[VariantRecord], say: Callable[[VariantRecord], LiveAccuracy | None], act: str
) -> ContextLabels | None:
    """say: labels of a context, of variants as registered. They count where they have left that, contradict the app's, or say more; None: nowhere."""
    known, found = tuple(records), {}
    for one in known:
        own = say(one)
        left = own is not None and (own.excludes(one.measured) or one.truth is not None)
        if own is not None and left and own.wins(one.live, one.measured):
            found[one.variant] = own
    best: dict[str, float] = {}
    labels = ContextLabels(found, best)
    for one in labels.seen(known, act):
        best[one.model] = max(best.get(one.model, 0.0), one.accuracy or 0.0)
    return labels if found else None


# -- What an app's models must have in common.


def signature_difference(app: Signature, model: Signature) -> str | None:
    """How a model's inputs and outputs differ from its app's; None when any query to the app fits the model."""
    for what, wanted, found in (("input", app.inputs, model.inputs), ("output", app.outputs, model.outputs)):
        if sorted(map(_key, wanted)) != sorted(map(_key, found)):
            return f"the app's {what}s are {_words(wanted)}, the model's are {_words(found)}"
    return None


def worded(signature: Signature, request: Register, known: Signature | None) -> Signature:
    """The signature with its owner's words: names of columns, of a regressor's target, and the unit. What is not said is as in `known`."""
    inputs, outputs = signature.inputs, signature.outputs
    columns = request.columns or (known.inputs[0].columns if known is not None and len(known.inputs) == 1 else [])
    if len(inputs) == 1 and inputs[0].shape == [len(columns)]:
        inputs = [replace(inputs[0], columns=columns)]
    name, unit = ("", "") if known is None else known.target
    name, unit = request.target or name, request.unit or unit
    if (name or unit) and request.metric in TARGETS:
        outputs = [replace(outputs[0], columns=[name] if name else [], unit=unit), *outputs[1:]]
    return Signature(inputs=inputs, outputs=outputs)


def _key(spec: TensorSpec) -> tuple[str, str, list[int]]:
    return (spec.name, spec.datatype, spec.shape)


def _words(specs: list[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype}{spec.shape}" for spec in specs) or "none"


def _meaning_difference(own: ModelRecord, other: ModelRecord) -> str | None:
    """How the answers of two versions differ in what they mean; None: they do not."""
    differences = [
        f"the app's {what} {verb} {mine}, the version's {verb} {theirs}"
        for what, verb, mine, theirs in (
            ("classes", "are", _named(own.labels), _named(other.labels)),
            ("metric", "is", own.metric, other.metric),
            ("unit", "is", own.signature.target[1] or "not named", other.signature.target[1] or "not named"),
        )
        if mine != theirs
    ]
    return "; ".join(differences) or None


def _named(labels: list[str]) -> str:
    return ", ".join(labels) or "without names"


_KEYS = "pipeline."  # begin the keys of these records


def replicas_key(pipeline: str) -> str:
    return _KEYS + pipeline


class KeptReplicas(dict[str, PipelineReplicas]):
    """By pipeline, from the last entries of the bucket, which has others, too."""

    def change(self, key: str, value: bytes | None) -> None:
        """An entry of the bucket has this value now; None: it is gone."""
        if key.startswith(_KEYS):
            pipeline, state = key.removeprefix(_KEYS), decode_kept(PipelineReplicas, value)
            self.pop(pipeline, None)
            if state is not None:
                self[pipeline] = state
