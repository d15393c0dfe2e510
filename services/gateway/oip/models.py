"""The protocol's models: names `<app>`, `<app>.<model>` or `<app>.<model>.<variant>`, and what is registered under them."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from bus.messages.catalog import Signature, TensorSpec, VariantRecord
from bus.subjects import valid_name
from bus.tensors import scored_shape
from services.core.catalog import Catalog
from services.gateway.errors import RequestFailed
from services.gateway.oip.parameters import joined

MAX_NAME = 3 * 64 + 2  # characters of the longest name: three tokens and the dots between them


class ModelTarget(NamedTuple):
    """What a name and version stand for."""

    app: str
    model: str | None = None
    variant: str | None = None
    version: str | None = None

    def requirements(self) -> dict[str, str]:
        """The requirements that the name stands for."""
        named = {"model": self.model, "variant": self.variant, "version": self.version}
        return {name: value for name, value in named.items() if value is not None}


def parse_target(name: str, version: str | None = None) -> ModelTarget | None:
    """The target with this name; None where the name or version is invalid."""
    if len(name) > MAX_NAME or (version is not None and len(version) > MAX_NAME):
        return None  # names of any length do not get into the cache
    return _parse(name, version)


@lru_cache(1024)
def _parse(name: str, version: str | None) -> ModelTarget | None:
    parts = name.split(".")
    if (
        len(parts) > 3
        or not all(valid_name(part) for part in parts)
        or (version is not None and not valid_name(version))
    ):
        return None
    app, model, variant = (*parts, None, None)[:3]
    assert app is not None
    return ModelTarget(app, model, variant, version)


# -- What is registered under a name

PLATFORMS = {"ort": "onnxruntime_onnx", "torch": "pytorch_libtorch"}
MODELLESS = "infaas_modelless"  # the platform of apps and models: several variants may answer
PIPELINE = "infaas_pipeline"  # other apps answer together


class ServedModel(NamedTuple):
    """What the catalogue has under a name. variants: those that may answer. versions: of all its models. A pipeline has neither.

    classes: their names, in the order of the scores; empty: there are none, or models differ.
    """

    name: str
    signature: Signature
    versions: list[str]
    variants: tuple[VariantRecord, ...]
    platform: str
    classes: Sequence[str] = ()


def find(catalog: Catalog, target: ModelTarget) -> ServedModel | None:
    """What is registered under a target; None where nothing is."""
    app = catalog.app(target.app)
    if app is None or (target.model is not None and target.model not in app.links):
        return None
    if app.pipeline is not None and app.signature is not None:
        return (
            None
            if target.version is not None
            else ServedModel(app.app, app.signature, [], (), PIPELINE, catalog.classes_of(app))
        )
    models = [target.model] if target.model is not None else sorted(app.links)
    versions = sorted({version for model in models for version in catalog.versions_for(app, model)}, key=_in_order)
    if target.version is not None:
        versions = [version for version in versions if version == target.version]
        models = [model for model in models if target.version in catalog.versions_for(app, model)]
        variants = tuple(variant for model in models for variant in catalog.variants_at(model, target.version))
    else:
        variants = tuple(variant for model in models for variant in catalog.variants_at(model, app.links[model]))
    if target.variant is not None:
        one = catalog.variant(target.variant)
        variants = (one,) if one is not None and one.model == target.model and one.version in versions else ()
        versions = [variant.version for variant in variants]
    if not variants:
        return None
    signature = app.signature if app.signature is not None else variants[0].signature
    name = ".".join(part for part in (target.app, target.model, target.variant) if part is not None)
    platform = MODELLESS
    if target.variant is not None:
        platform = PLATFORMS.get(variants[0].framework, variants[0].framework)
    classes = variants[0].labels if all(one.labels == variants[0].labels for one in variants) else []
    return ServedModel(name, signature, versions, variants, platform, classes)


def metadata(known: ServedModel) -> dict[str, Any]:
    """The reply to `GET /v2/models/<m>`. properties: the owner's words as texts, which gRPC has, too."""
    target, unit = known.signature.target
    words = {"labels": joined(known.classes), "target": target, "unit": unit}
    return {
        "name": known.name,
        "versions": known.versions,
        "platform": known.platform,
        "inputs": [_metadata(spec) for spec in known.signature.inputs],
        "outputs": [_metadata(spec, known.classes) for spec in known.signature.outputs],
        "properties": {name: text for name, text in words.items() if text},
    }


def config(known: ServedModel) -> dict[str, Any]:
    """The reply to `GET /v2/models/<m>/config`: the fields of Triton's model configuration that apply."""
    return {
        "name": known.name,
        "platform": known.platform,
        "backend": "infaas",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max((variant.max_batch for variant in known.variants), default=1),
        "input": [
            {
                **_config(spec),
                "format": "FORMAT_NONE",
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
            }
            for spec in known.signature.inputs
        ],
        "output": [
            {**_config(spec), "label_filename": "", "is_shape_tensor": False} for spec in known.signature.outputs
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {"priority": "PRIORITY_DEFAULT"},
        "dynamic_batching": {"priority_levels": 9, "default_priority_level": 5},
        "instance_group": [],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def index(catalog: Catalog, *, ready: bool, only: str = "") -> Iterator[dict[str, str]]:
    """The reply to `POST /v2/repository/index`: every name that may be queried, of one app or of all. ready: whether queries can be answered."""
    state = (
        {"state": "READY", "reason": ""} if ready else {"state": "UNAVAILABLE", "reason": "no query can be answered"}
    )
    for app in sorted(catalog.apps, key=lambda record: record.app):
        if (only and app.app != only) or (app.pipeline is None and not catalog.variants_of(app.app)):
            continue
        yield {"name": app.app, "version": "", **state}
        for model, version in sorted(app.links.items()):
            for known in sorted(catalog.versions_for(app, model), key=_in_order):
                note = (
                    {}
                    if known == version
                    else {"reason": f"version {version} is served; this one is queried by its name"}
                )
                yield {"name": f"{app.app}.{model}", "version": known, **state, **note}
            for variant in catalog.variants_at(model, version):
                yield {"name": f"{app.app}.{model}.{variant.variant}", "version": version, **state}


def _metadata(spec: TensorSpec, classes: Sequence[str] = ()) -> dict[str, Any]:
    """columns, unit, labels (of each score): where they are known."""
    scored = scored_shape(spec.shape) == [len(classes)]
    words = {"columns": spec.columns, "unit": spec.unit, "labels": classes if scored else ()}
    more = {name: word for name, word in words.items() if word}
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.shape], **more}


def _config(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}


def _in_order(version: str) -> tuple[int, int, str]:
    return (0, int(version), "") if version.isdigit() else (1, 0, version)


# -- For REST and gRPC

NAME = "infaas"
EXTENSIONS = [
    "modelless",
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
]


def server_metadata(version: str) -> dict[str, Any]:
    """The reply to `GET /v2`. version: of this package."""
    return {"name": NAME, "version": version, "extensions": EXTENSIONS}


def target_of(name: str, version: str | None) -> ModelTarget:
    """The target of a request. Raises RequestFailed."""
    found = parse_target(name, version or None)
    if found is None:
        raise RequestFailed(
            None,
            "no model can have such a name: names are <app>, <app>.<model> or <app>.<model>.<variant>, of letters, digits, - and _",
            code="unknown_model",
        )
    return found


def served_model(catalog: Catalog, name: str, target: ModelTarget) -> ServedModel:
    """What is registered under a name. Raises RequestFailed."""
    found = find(catalog, target)
    if found is None:
        what = f"{name[:80]!r} of version {target.version!r}" if target.version else repr(name[:80])
        text = f"no model {what} is registered: see /v2/models{catalog.meant_app(name)}"
        raise RequestFailed(None, text, code="unknown_model")
    return found
