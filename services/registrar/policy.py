"""Which variants to generate of a model, which of those that were built may serve, and whether a user's own process (`infaas container`) is a new
version of its model or one more replica of a registered one.

The choice was measured (EfficientNet-Lite and MNIST families, onnxruntime on AVX512-VNNI): static int8 (QDQ, per channel, calibrated)
makes convolutional nets 1.5 to 5 times faster at equal accuracy, and nets of matrix products up to 2.7 times. Dynamic int8 is not built: it
takes the scale of its activations from the whole batch, so that an answer depends on its neighbours. Measured agreement with the fp32 answers, not accuracy alone,
shows a broken quantisation. INFaaS calls this part the Variant-Generator (Romero et al., ATC 2021, section 3).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite

from msgspec.structs import replace

from bus.messages.catalog import AppRecord, ModelRecord, Profile, VariantRecord
from bus.messages.public import Error
from bus.messages.quality import Cascade
from bus.messages.work import CascadePlan, ContainerPlace, ModelInspected, PlaceContainer, VariantBuilt, VariantPlan
from services.core.catalog import Catalog
from services.core.cost import cores_of
from services.core.emulation import KINDS, emulated, originals
from services.core.placement import REMOTE
from services.core.settings import RegistrarSettings
from services.registrar.checks import CONTAINER
from services.registrar.commands import error_of

LONGEST_NAME = 64
NATIVE = "native"  # precision of a user's own process or of a remote engine, which nobody else knows
WORKER_TIMEOUT_S = 3.0  # a worker without a heartbeat for so long gets no order
WORKER_LOST_S = 15.0  # after which the order that it has is lost
SILENCE_S = 120.0  # without a report on its order, after which a worker loses it
REGISTRAR_TIMEOUT_S = 5.0  # a registrar without a heartbeat for so long is gone
ATTEMPTS = 2  # of one phase of a registration


def plans(
    model: str, version: str, format: str, inspected: ModelInspected, cores: int, settings: RegistrarSettings
) -> list[VariantPlan]:
    """The variants to build on a worker with so many cores, the plainest first; empty when no framework there can run the model."""
    threads = sorted({count for count in settings.threads if 1 <= count <= cores}) or [1]
    if inspected.hardware != "cpu":
        threads = [1]  # of the host, which only feeds the device
    limit = inspected.most_batch or max(settings.max_batches)
    batches = (
        [1]
        if inspected.fixed_batch
        else sorted({min(most, limit) for most in settings.max_batches if most >= 1}) or [1]
    )
    return [
        VariantPlan(
            variant=variant_name(model, version, framework, precision, count, most),
            framework=framework,
            precision=precision,
            threads=count,
            max_batch=most,
            format=built_format,
            hardware=inspected.hardware,
        )
        for framework, precision, built_format in _builds(format, inspected)
        for count in threads
        for most in batches
    ]


def _builds(format: str, inspected: ModelInspected) -> Iterable[tuple[str, str, str]]:
    """Framework, precision and file format of each artifact worth building."""
    if inspected.hardware != "cpu":
        yield from (one for one in _accelerated(format, inspected) if usable(one[0], inspected.frameworks))
        return
    if usable("ort", inspected.frameworks):
        yield "ort", "fp32", "onnx"
        if _quantisable(inspected):
            yield "ort", "int8", "onnx"
    if format in ("pt2", "torchscript") and usable("torch", inspected.frameworks):
        yield "torch", "fp32", format


def _accelerated(format: str, inspected: ModelInspected) -> Iterable[tuple[str, str, str]]:
    """The same for a GPU or a remote engine. The framework's name tells these variants from those for the CPU.

    A GPU is fastest in half precision; int8 pays only where TensorRT fuses it. Every model has an ONNX file, its own or one made of a
    torch program.
    """
    if format == REMOTE:
        yield REMOTE, NATIVE, REMOTE
    elif inspected.hardware == "gpu":
        if format == "pt2":
            yield from (("torch-cuda", precision, "pt2") for precision in ("fp32", "fp16"))
        yield from (("ort-cuda", precision, "onnx") for precision in ("fp32", "fp16"))
        yield from (("tensorrt", precision, "onnx") for precision in ("fp32", "fp16"))
        if _quantisable(inspected):
            yield "tensorrt", "int8", "onnx"


def adds_integers(plan: VariantPlan, inspected: ModelInspected) -> bool:
    """Whether a variant's answers depend on how the CPU adds products of small integers."""
    return plan.hardware == "cpu" and (plan.precision == "int8" or _quantised(inspected))


def _quantised(inspected: ModelInspected) -> bool:
    """Whether the uploaded model itself computes with small integers."""
    names = [name.lower() for name in inspected.operators]
    return any("quant" in name or "integer" in name or name.startswith("qlinear") for name in names)


def plans_for(arithmetic: str, planned: Iterable[VariantPlan], inspected: ModelInspected) -> list[VariantPlan]:
    """Of these plans those that are measured anew on CPUs of another arithmetic, with names of their own."""
    return [replace(plan, variant=named_for(arithmetic, plan)) for plan in planned if adds_integers(plan, inspected)]


def named_for(mark: str, plan: VariantPlan) -> str:
    """The plan's name with a mark that tells it from others of the same version."""
    tail = f"-t{plan.threads}-b{plan.max_batch}"
    head = plan.variant.removesuffix(tail)
    return f"{head[: LONGEST_NAME - len(tail) - len(mark) - 1]}-{mark}{tail}"


def usable(framework: str, frameworks: Mapping[str, str]) -> bool:
    """Whether the worker can run this framework: it reports the framework, and no reason against it."""
    return frameworks.get(framework) == ""


def _quantisable(inspected: ModelInspected) -> bool:
    return not _quantised(inspected) and any(_kind(operator) != "other" for operator in inspected.operators)


def _kind(operator: str) -> str:
    """What an operator computes, from its ONNX or ATen name."""
    name = operator.lower().removeprefix("aten.").removeprefix("aten::")
    if "conv" in name and "convert" not in name:
        return "convolution"
    if name.partition(".")[0] in {"matmul", "gemm", "linear", "addmm", "mm", "bmm"}:
        return "product"
    return "other"


def variant_name(model: str, version: str, framework: str, precision: str, threads: int, max_batch: int) -> str:
    """A name that no other variant in the cluster has, of at most 64 characters.

    It contains a hash when it would be too long, or when a dash in the version would make it ambiguous where the model's name ends.
    """
    head = f"{model}-v{version}"
    tail = f"-{framework}-{precision}-t{threads}-b{max_batch}"
    if "-" in version or len(head) + len(tail) > LONGEST_NAME:
        digest = hashlib.sha256(f"{model}\0{version}".encode()).hexdigest()[:6]
        head = f"{head[: LONGEST_NAME - len(tail) - 7]}-{digest}"
    return head + tail


# -- cascades: a cheap variant answers what it is sure of, a dear one the rest (Wang et al., "IDK Cascades", UAI 2018)

CASCADE = "cascade"  # precision of such a variant, whose parts may have two
CHEAPER = 1.25  # how many times than any single variant that is as accurate
LEAST_SAMPLES = 200  # in each half of which a cascade must be as right
MOST_CASCADES = 32  # that are tried


def cascades(
    model: str, version: str, own: Iterable[VariantRecord], others: Iterable[VariantRecord]
) -> list[CascadePlan]:
    """The cascades worth a try of one of a version's own variants and one of its app's other models, measured on the same samples; the likeliest first.

    All samples that the first part gets wrong and the second one right have to go on: a cascade cannot cost less. Threads and largest batch of its
    parts are its own.
    """
    own, others = tuple(own), tuple(others)
    ours = [one for one in own if _may_join(one)]
    singles = [one for one in (*ours, *others) if _may_join(one)]
    names = {one.variant for one in ours}
    plain = [one for one in (*own, *others) if one.hardware == "cpu" and not one.simulated]
    known = [(one.accuracy or 0.0, _item_s(one)) for one in plain if one.profile.saturation_qps > 0.0]
    found: dict[tuple[str, ...], tuple[float, CascadePlan]] = {}
    for first in singles:
        for then in singles:
            gain = (then.accuracy or 0.0) - (first.accuracy or 0.0)
            alike = (first.threads, first.max_batch) == (then.threads, then.max_batch)
            if gain <= 0.0 or not alike or (first.variant in names) == (then.variant in names):
                continue
            if len({first.arithmetic, then.arithmetic} - {""}) > 1:
                continue
            most = min(cost for accuracy, cost in known if accuracy >= (then.accuracy or 0.0)) / CHEAPER
            costs = _item_s(first), _item_s(then)
            least = costs[0] + gain * costs[1]
            if least > most:
                continue
            plan = VariantPlan(
                variant=variant_name(model, version, "ort", CASCADE, first.threads, first.max_batch),
                framework="ort",
                precision=CASCADE,
                threads=first.threads,
                max_batch=first.max_batch,
                format="onnx",
            )
            made = CascadePlan(
                plan=plan,
                cascade=Cascade(parts=[first.variant, then.variant], versions=[*first.versions, *then.versions]),
                artifacts=[first.artifact, then.artifact],
                costs=costs,
                most=most,
                model_accuracy=then.model_accuracy,
                arithmetic=first.arithmetic or then.arithmetic,
            )
            found[first.variant, then.variant] = least / most, made
    return [made for _, made in sorted(found.values(), key=lambda one: one[0])[:MOST_CASCADES]]


def _may_join(record: VariantRecord) -> bool:
    own = (record.hardware, record.framework, record.format, record.metric) == ("cpu", "ort", "onnx", "top1")
    plain = not (record.simulated or record.alone or record.functions or record.cascade)
    return own and plain and record.samples >= LEAST_SAMPLES and record.profile.saturation_qps > 0.0


def _item_s(record: VariantRecord) -> float:
    """Seconds of a core that an item takes at most throughput."""
    return cores_of(record) / record.profile.saturation_qps


def next_version(versions: Iterable[str]) -> int:
    """The number after the largest one; versions that are no numbers do not count."""
    return max((int(version) for version in versions if version.isascii() and version.isdigit()), default=0) + 1


def defect(built: VariantBuilt, settings: RegistrarSettings) -> str | None:
    """Why a variant that was built may not serve; None when it may."""
    if not isfinite(built.accuracy):
        return "its accuracy on the validation set is not a number: the model gives NaN or infinite outputs there"
    if not 0.0 <= built.accuracy <= 1.0:
        return f"its accuracy was reported as {built.accuracy:g}, outside 0..1"
    low, high = built.accuracy_low, built.accuracy_high
    if (
        not 0.0
        <= (built.accuracy if low is None else low)
        <= built.accuracy
        <= (built.accuracy if high is None else high)
        <= 1.0
    ):
        return f"the interval of its accuracy {built.accuracy:g} was reported as {low} to {high}"
    if built.agreement is not None and not built.agreement >= settings.agreement:
        return f"it agrees with the fp32 answers in {built.agreement:.1%} of the validation set, below {settings.agreement:.0%}"
    return _incomplete(built.profile)


def _incomplete(profile: Profile) -> str | None:
    if not profile.rows:
        return "its profile has no measurement"
    figures = [profile.load_ms, profile.memory_mb, profile.saturation_qps]
    figures += [figure for row in profile.rows for figure in (row.p50_ms, row.p99_ms)]
    figures += [end for row in profile.rows for end in (row.p99_low_ms, row.p99_high_ms) if end is not None]
    if not all(isfinite(figure) and figure >= 0.0 for figure in figures) or profile.saturation_qps == 0.0:
        return "its profile holds figures that cannot be (negative, infinite, or no throughput)"
    return None


# -- A dominated variant is better than another one in no respect, and worse in at least one. It is kept, but marked, so that nobody
# chooses it by mistake.
#
# Only variants of the same hardware are compared, since machines of different kinds differ in price and may be full at different times.
# On one kind, threads and memory decide an instance's price, so they represent it here.


def mark_dominated(variants: Iterable[VariantRecord]) -> tuple[VariantRecord, ...]:
    """The same variants in the same order, each with `dominated` set by comparison with the others."""
    pool = list(variants)
    return tuple(
        replace(variant, dominated=any(dominates(other, variant) for other in pool if other is not variant))
        for variant in pool
    )


def dominates(better: VariantRecord, worse: VariantRecord) -> bool:
    """Whether `better` is at least as good in every respect, and better in at least one.

    Respects: accuracy, latency at every length and batch size measured for `worse`, load latency, memory, threads, saturation
    throughput and largest batch. An unknown accuracy is worse than any known one.
    """
    if better.hardware != worse.hardware or better.simulated != worse.simulated:
        return False
    mine, theirs = _figures(better, worse), _figures(worse, worse)
    return len(mine) == len(theirs) and all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _figures(variant: VariantRecord, cells_of: VariantRecord) -> Sequence[float]:
    """All respects as numbers. Smaller is better. A length and batch size that was not measured counts as infinitely slow."""
    profile = variant.profile
    measured = {(row.length, row.batch): row.p50_ms for row in profile.rows}
    return (
        inf if variant.accuracy is None else -variant.accuracy,
        profile.load_ms,
        profile.memory_mb,
        variant.threads,
        -profile.saturation_qps,
        -variant.max_batch,
        *(measured.get((row.length, row.batch), inf) for row in cells_of.profile.rows),
    )


def simulated_variants(measured: Iterable[VariantRecord], kinds: Iterable[str]) -> tuple[VariantRecord, ...]:
    """The variants for simulated devices of these kinds that follow from these variants of one version of a model."""
    pool = list(measured)
    return tuple(
        record
        for kind in sorted(set(kinds) & KINDS.keys())
        for record in mark_dominated(
            emulated(original, kind, _simulated_name(original, kind)) for original in originals(pool, kind)
        )
    )


def _simulated_name(original: VariantRecord, kind: str) -> str:
    """Its name alone tells a simulated variant from a real one in events and costs."""
    of = original
    return variant_name(of.model, of.version, f"sim{kind}", of.precision, of.threads, of.max_batch)


def place_of(question: PlaceContainer, catalog: Catalog, agreement: float) -> ContainerPlace | Error:
    """The place of this process. agreement: the share of equal answers that a replica must give, at least."""
    request = question.request
    app = catalog.app(request.app)
    known = sorted(catalog.versions(request.model).values(), key=lambda record: record.created)
    version = request.version or next(
        (record.version for record in reversed(known) if record.format == CONTAINER),
        str(next_version(record.version for record in known)),
    )
    record = catalog.model(request.model, version)
    place = ContainerPlace(version=version, signature=None if app is None else app.signature, agreement=agreement)
    if record is None:
        return place
    named = f"version {version} of model {request.model}"
    variants = [one for one in catalog.variants_at(request.model, version) if one.framework == CONTAINER]
    if record.format != CONTAINER or not variants:
        return error_of(f"version: {named} is a registered file, and no container; give another --version")
    if app is None or record.model not in app.links:
        link = f"infaas admin link-model {request.app} --model {record.model} --version {version}"
        return error_of(f"app: {named} is registered, but not for app {request.app}; link it with `{link}`")
    wrong = without_effect(question, record, app)
    if wrong:
        return error_of(f"{wrong[0]}; a replica changes nothing: leave it out, or give another --version")
    return ContainerPlace(
        version=version, signature=app.signature, agreement=agreement, variant=variants[0], reference=record.source
    )


def without_effect(question: PlaceContainer, record: ModelRecord, app: AppRecord) -> list[str]:
    """Options of a replica that say something else than what is registered, which one more process does not change."""
    asked, named, of_app = question.request, f"version {record.version} of model {record.model}", f"app {app.app}"
    return [
        f"--{option}: {whose} has {kept!r} and not {wanted!r}"
        for option, wanted, kept, whose in (
            ("task", asked.task, record.task, named),
            ("metric", question.metric, record.metric, named),
            ("labels", asked.labels or None, record.labels, named),
            ("latency-ms", asked.latency_ms, app.latency_ms, of_app),
            ("slo-target", asked.slo_target, app.slo_target, of_app),
            ("default-output", asked.default_output, app.default_output, of_app),
            ("accuracy", asked.accuracy, app.accuracy, of_app),
        )
        if wanted is not None and wanted != kept
    ]
