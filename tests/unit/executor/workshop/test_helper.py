"""The helper on a bus in this process: honest models become variants, hostile ones reasons.

To start a sandbox takes a second of computing. So most tests let this process do its work, and those about its process have `confined`.
"""

import asyncio
import hashlib
import json
import os
import signal

import numpy as np
import onnxruntime
import pytest
from msgspec.structs import replace

from bus.messages.catalog import Functions, TensorSpec
from bus.messages.quality import Cascade
from bus.messages.work import (
    CascadePlan,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkProgress,
)
from services.core.settings import RegistrarSettings
from services.executor.backends import backend
from services.executor.backends.base import LoadSpec
from services.executor.workshop.actor import WorkshopOrder
from services.executor.workshop.sandbox import supervisor
from services.executor.workshop.sandbox.protocol import Frame, Inspected, InspectTask, SandboxLimits, ValidationFile
from services.executor.workshop.tasks.profiling import MOST_NEIGHBOURS
from services.executor.workshop.tasks.validation import wilson
from tests.support.clients.responders import until
from tests.support.models import poison_models, tiny_models
from tests.support.models.tiny_models import npz
from tests.support.servers.engine import engine
from tests.support.servers.processes import about as told
from tests.support.servers.processes import alive
from tests.support.servers.workshop import GOOD, Shop, X, Y


@pytest.fixture
def shop(tmp_path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def confined(tmp_path) -> Shop:
    return Shop(tmp_path, confined=True)


def plan(precision: str = "fp32", *, framework: str = "ort", threads: int = 1, most: int = 4, format: str = "onnx"):
    name = f"m-{framework}-{precision}-t{threads}-b{most}"
    return VariantPlan(
        variant=name, framework=framework, precision=precision, threads=threads, max_batch=most, format=format
    )


def test_a_model_is_inspected_and_kept_under_its_digest(confined):
    confined.inspect(tiny_models.mlp())
    assert confined.reason is None
    (found,) = confined.of(ModelInspected)
    assert found.baseline_accuracy == 1.0
    assert (found.samples, found.fixed_batch, found.operators) == (200, False, ["MatMul", "Relu"])
    assert (found.signature.inputs[0].shape, found.signature.outputs[0].shape) == ([16], [4])
    assert found.frameworks["ort"] == ""
    assert "pt2" in found.frameworks["torch"]
    assert confined.kept[found.source] == tiny_models.mlp()
    assert {hashlib.sha256(content).hexdigest() for content in confined.kept.values()} == set(confined.kept)
    assert next(one.step for one in confined.of(WorkProgress)) == "fetching the files"


@pytest.mark.parametrize(
    ("content", "fixed"),
    [
        (tiny_models.mlp(1), False),
        (tiny_models.mlp(8), False),
        (tiny_models.reshaping(1), False),
        (tiny_models.mixing(1), True),
        (tiny_models.mixing(), True),
    ],
)
def test_batches_are_proved_not_believed(shop, content, fixed):
    (found,) = shop.inspect(content).of(ModelInspected)
    assert found.fixed_batch is fixed


def test_a_batch_that_is_fixed_at_more_than_one_item_is_refused(shop):
    assert "open (dynamic) first axis" in shop.inspect(tiny_models.mixing(4)).reason
    assert not shop.of(ModelInspected)


def test_several_inputs_open_lengths_and_regression(shop) -> None:
    (found,) = shop.inspect(tiny_models.two_inputs(), npz(a=X, b=X, y=Y)).of(ModelInspected)
    assert [one.name for one in found.signature.inputs] == ["a", "b"]
    tokens = np.random.default_rng(0).integers(0, 50, (200, 32))
    (found,) = shop.inspect(tiny_models.sequence(), npz(x=tokens, y=Y)).of(ModelInspected)
    assert found.signature.inputs[0].shape == [-1]
    (built,) = shop.build(plan(most=2)).of(VariantBuilt)
    assert sorted({row.length for row in built.profile.rows}) == [4, 8, 16, 32]
    first, second = tiny_models.weights()
    scores = np.maximum(X @ first, 0) @ second
    (found,) = shop.inspect(tiny_models.mlp(), npz(x=X, y=scores), metric="rmse").of(ModelInspected)
    assert found.baseline_accuracy > 0.99


@pytest.mark.parametrize(
    ("model", "validation", "why"),
    [
        (b"a text file", GOOD, "not an ONNX model"),
        (tiny_models.external_data("/etc/passwd"), GOOD, "other files"),
        (tiny_models.not_a_number(), GOOD, "NaN"),
        (tiny_models.mlp(), npz(x=X, y=Y + 4), "outside the model's 4 classes"),
        (tiny_models.mlp(), npz(x=X[:, :3], y=Y), "`x` has shape"),
        (tiny_models.mlp(), b"no zip", "not an .npz"),
        (tiny_models.two_inputs(), npz(a=X, y=Y), "no array `b`"),
    ],
)
def test_what_cannot_be_accepted_gets_its_reason(shop, model, validation, why):
    assert why in shop.inspect(model, validation).reason
    assert not shop.of(ModelInspected)
    assert not shop.kept
    assert str(shop.directory) not in shop.reason


def test_models_that_never_end_or_are_too_large_cost_themselves_only(tmp_path) -> None:
    shop = Shop(tmp_path, RegistrarSettings(seconds=3.0), confined=True)
    assert "longer than" in shop.inspect(tiny_models.endless()).reason
    shop = Shop(tmp_path, RegistrarSettings(memory_mb=400, seconds=60.0), confined=True)
    assert "memory" in shop.inspect(tiny_models.greedy(2**28)).reason


def test_files_larger_than_allowed_or_missing_are_refused(tmp_path):
    shop = Shop(tmp_path, RegistrarSettings(max_model_mb=1, seconds=60.0))
    assert "larger than the 1 MB" in shop.inspect(bytes(2 * 2**20)).reason
    order = InspectModel(
        registration="r", format="onnx", object="gone", validation="v", inputs_key="x", labels_key="y", metric="top1"
    )
    asyncio.run(shop._run(WorkshopOrder(worker="w", inspect=order), {}))
    assert "`object`" in shop.reason


@pytest.mark.parametrize("format", ["torchscript", "savedmodel", "pt2"])
def test_other_formats_are_refused_when_content_or_settings_say_so(shop, format):
    assert shop.inspect(tiny_models.mlp(), format=format).reason


@pytest.mark.slow
def test_variants_share_artifacts_and_profiles(confined):
    confined.inspect(tiny_models.mlp()).build(
        plan(most=2), plan(most=8), plan(threads=2, most=8), plan("int8", most=2), plan("fp7")
    )
    assert confined.reason is None
    built = {one.plan.variant: one for one in confined.of(VariantBuilt)}
    assert set(built) == {"m-ort-fp32-t1-b2", "m-ort-fp32-t1-b8", "m-ort-fp32-t2-b8", "m-ort-int8-t1-b2"}
    small, large = built["m-ort-fp32-t1-b2"], built["m-ort-fp32-t1-b8"]
    assert small.artifact == large.artifact == built["m-ort-fp32-t2-b8"].artifact
    assert confined.kept[small.artifact] == tiny_models.mlp()
    assert [row.batch for row in small.profile.rows] == [1, 2]
    assert [row.batch for row in large.profile.rows] == [1, 2, 4, 8]
    assert large.accuracy == large.agreement == 1.0
    assert large.profile.saturation_qps == max(row.batch / row.p50_ms * 1000 for row in large.profile.rows)
    assert large.profile.load_ms > 0
    assert (large.profile.init_ms, large.profile.transfer_ms, large.profile.host_mb) == (None, None, None)
    assert {"isa", "cpu", "onnxruntime", "date"} <= set(large.profile.host)
    assert large.profile.provenance == "measured"
    steps = [fact.step if isinstance(fact, WorkProgress) else "" for fact in confined.facts]
    assert confined.facts.index(built["m-ort-fp32-t1-b8"]) < steps.index("building ort int8"), "it serves meanwhile"
    quantised = built["m-ort-int8-t1-b2"]
    assert quantised.artifact != small.artifact
    assert quantised.agreement >= 0.9
    (failed,) = confined.of(VariantFailed)
    assert (failed.plan.variant, "fp7" in failed.reason) == ("m-ort-fp7-t1-b4", True)


OWN = b"def right(y, outputs):\n    return float((next(iter(outputs.values())).argmax(axis=1) == [one['is'] for one in y]).mean())\n"


def test_without_labels_variants_agree(shop):
    shop.inspect(tiny_models.mlp(), npz(x=X), metric="agreement")
    assert shop.reason is None
    assert shop.of(ModelInspected)[0].baseline_accuracy == 1.0
    shop.build(plan(), plan("int8"), metric="agreement")
    built = {one.plan.precision: one for one in shop.of(VariantBuilt)}
    assert (built["fp32"].accuracy, built["fp32"].agreement) == (1.0, 1.0)
    assert built["int8"].accuracy == built["int8"].agreement < 1.0, "scores of int8 are other numbers"


def test_a_function_of_the_users_own_judges_in_the_sandbox(shop, confined):
    labels = np.array([json.dumps({"is": int(one)}) for one in (Y + (np.arange(len(Y)) < 20)) % 4])
    own = npz(x=X, y=labels, **{"y.metric": np.frombuffer(OWN, np.uint8)})
    confined.inspect(tiny_models.mlp(), own, metric="right").build(plan(), metric="right")
    (variant,) = confined.of(VariantBuilt)
    assert (variant.accuracy, variant.agreement) == (pytest.approx(0.9), None)
    shop.inspect(tiny_models.mlp(), npz(x=X, y=Y), metric="right")
    assert shop.reason.startswith("metric 'right' is unknown: use one of top1")


AROUND = """
import struct
NAMES = ["north", "east", "south", "west"]
def decode(item):
    if item[:2] != b"\\xff\\xd8":
        raise ValueError("no picture")
    return struct.unpack("<16f", item[2:-1])
def name(scores):
    return {"class": NAMES[scores.argmax()], "score": float(scores.max())}
def best(scores):
    return scores.max()
def spy(item):
    open("/etc/hostname").read()
def gone(item):
    import os
    os._exit(3)
"""
PICTURES = np.array([b"\xff\xd8" + one.tobytes() + b"." for one in X.astype("<f4")])
NAMED = npz(x=PICTURES, y=np.array(["north", "east", "south", "west"])[Y])


def around(before: str = "", after: str = "", source: str = AROUND) -> Functions:
    return Functions(before=before and f"o.py:{before}", after=after and f"o.py:{after}", sources={"o.py": source})


@pytest.mark.slow
def test_functions_of_the_owner_run_before_and_after_the_model_and_are_measured_with_it(confined):
    (found,) = confined.inspect(tiny_models.mlp(), NAMED, functions=around("decode", "name")).of(ModelInspected)
    assert found.baseline_accuracy == 1.0, "the class' name that comes out is compared with the label's"
    assert found.signature.inputs == [TensorSpec(name="x", datatype="BYTES", shape=[], binary=True)]
    assert [(one.name, one.datatype) for one in found.signature.outputs] == [("class", "BYTES"), ("score", "FP64")]
    assert found.functions.model.inputs[0].shape == [16]
    confined.build(plan(), plan("int8"), functions=found.functions)
    built = confined.of(VariantBuilt)
    assert len(built) == 2, "int8 is calibrated on what `before` makes of the samples"
    exact = next(one for one in built if one.plan.precision == "fp32")
    assert (exact.accuracy, [row.batch for row in exact.profile.rows]) == (1.0, [1, 2, 4])
    assert all(one.profile.memory_mb > 5 for one in built), "the memory of the functions' process is the variant's"
    assert all(one.functions.ms > 0.0 and one.profile.load_ms > 20.0 for one in built), "each instance starts a process"
    assert exact.functions.words == f"before o.py:decode and after o.py:name ({exact.functions.ms:.3g} ms)"


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        (around("spy", "name"), "o.py:spy: PermissionError"),
        (around("gone", "name"), "the process ended with code 3 in o.py:gone"),
        (around("decode", source="import none_"), "o.py:decode: its file cannot be run: ModuleNotFoundError"),
        (around("decode"), "labels `y` must be numbers, not <U5"),
        (around("decode", "best"), "the labels are texts, but no output is one text an item"),
        (around(after="name"), "`x` has shape [200]: the model takes [n, 16]"),
    ],
)
def test_functions_that_do_not_do_get_their_reason(shop, functions, why):
    assert why in shop.inspect(tiny_models.mlp(), NAMED, functions=functions).reason
    assert not shop.kept


def test_variants_whose_answers_depend_on_their_batch_compute_items_alone(shop):
    """Each variant is asked itself: inspection, with ordinary samples, had found nothing."""
    shop.inspect(tiny_models.limiting()).build(plan(most=8), plan(threads=2, most=8))
    assert [one.fixed_batch for one in shop.of(ModelInspected)] == [False]
    for built in shop.of(VariantBuilt):
        assert built.alone == "an item's answer is another one beside an item of 1e+06"
        assert [row.batch for row in built.profile.rows] == [1]
        assert built.profile.saturation_qps == pytest.approx(1000.0 / built.profile.rows[0].p50_ms)
    assert len(shop.of(VariantBuilt)) == 2
    shop.inspect(tiny_models.mlp()).build(plan(most=8))
    (honest,) = shop.of(VariantBuilt)
    assert (honest.alone, honest.profile.rows[-1].batch) == ("", 8)


def test_a_process_that_ends_beside_an_extreme_item_is_no_failure(confined):
    confined.inspect(poison_models.crashing(poison=1_000_000)).build(plan(most=8))
    assert confined.reason is None
    (built,) = confined.of(VariantBuilt)
    assert built.alone.startswith("in a batch with an extreme item it crashed")


def test_outputs_that_count_no_items_serve_one_item_a_call(shop, tmp_path):
    shop.inspect(tiny_models.detecting(), npz(x=X - X.mean()), metric="agreement")
    assert shop.reason is None
    (found,) = shop.of(ModelInspected)
    (boxes,) = found.signature.outputs
    assert (found.fixed_batch, boxes.bare, boxes.shape) == (True, True, [-1, 2])
    assert found.alone == "its output 'boxes' does not count items"
    shop.build(plan(most=1), metric="agreement")
    (built,) = shop.of(VariantBuilt)
    assert (built.accuracy, [row.batch for row in built.profile.rows]) == (1.0, [1])
    (tmp_path / "m.onnx").write_bytes(tiny_models.detecting())
    handle = backend("ort").load(tmp_path / "m.onnx", LoadSpec(signature=found.signature))
    for count in (0, 1, 5):
        item = np.where(np.arange(16) < count, 1.0, -1.0).astype("f4")[None]
        assert handle.run({"x": item})["boxes"].shape == handle.run_single(item)[0].shape == (1, count, 2)


def test_a_model_that_takes_one_item_says_why(shop):
    (found,) = shop.inspect(tiny_models.mixing()).of(ModelInspected)
    assert found.alone == "an item's answer is another one in a batch"
    (found,) = shop.inspect(tiny_models.mlp()).of(ModelInspected)
    assert found.alone == ""


def test_a_contended_profile_says_beside_how_many(shop):
    """How much slower they make it is tested with models of known pace (tasks/test_profiling.py): this machine is shared."""
    cores = len(os.sched_getaffinity(0))
    shop.inspect(tiny_models.mlp()).build(plan(), plan(threads=cores + 1), contended=True)
    beside = min(MOST_NEIGHBOURS, max(1, cores - 1))
    found = {one.plan.threads: one.profile.provenance for one in shop.of(VariantBuilt)}
    assert found[1] == f"measured: beside {beside} further instance{'s' * (beside > 1)}"
    assert found[cores + 1] == "measured: beside 1 further instance"
    assert all([row.batch for row in one.profile.rows] == [1, 2, 4] for one in shop.of(VariantBuilt))


def test_static_quantisation_is_calibrated_on_the_validation_set(shop):
    images = np.random.default_rng(0).normal(size=(200, 1, 8, 8)).astype("f4")
    shop.inspect(tiny_models.conv(), npz(x=images, y=Y)).build(plan(), plan("int8"), plan("int8-dynamic"))
    exact, built = shop.of(VariantBuilt)
    for one in (exact, built):  # samples that calibrate measure, too
        session = onnxruntime.InferenceSession(shop.kept[one.artifact], providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {session.get_inputs()[0].name: images})
        right = float((scores.argmax(1) == Y).mean())
        assert (one.accuracy, one.accuracy_low, one.accuracy_high) == pytest.approx(wilson(right, len(Y)))
    assert built.plan.precision == "int8"
    assert built.agreement >= 0.9
    assert b"QuantizeLinear" in shop.kept[built.artifact]
    (failed,) = shop.of(VariantFailed)
    assert "there is no recipe for precision 'int8-dynamic'" in failed.reason


@pytest.mark.slow
@pytest.mark.torch
async def test_sandboxes_may_be_copies_of_a_process_with_torch_each_locked_down_and_need_none(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "files").mkdir()
    (tmp_path / "pt2").write_bytes(tiny_models.exported(tmp_path / "files" / "m.pt2", torch))
    (tmp_path / "onnx").write_bytes(tiny_models.endless())
    (tmp_path / "validation").write_bytes(GOOD)
    about = {"inputs_key": "x", "labels_key": "y", "metric": "top1", "most_bytes": 2**24}
    data = ValidationFile(path=str(tmp_path / "validation"), **about)
    limits = SandboxLimits(memory_bytes=2**31, seconds=240.0, file_bytes=2**24)
    forks, frames = supervisor.TorchForks(), list[Frame]()

    async def inspect(format: str) -> Frame:
        model, scratch = str(tmp_path / format), str(tmp_path / "files")
        task = InspectTask(data=data, scratch=scratch, model=model, format=format, most_bytes=2**24)
        await supervisor.run(task, limits, frames.append, None, forks)
        return frames[-1]

    try:
        endless = asyncio.create_task(inspect("onnx"))
        await until(lambda: frames, 120.0)
        original = forks._process.pid
        copy = int(told(original, f"task/{original}/children").split()[0])
        assert {"NoNewPrivs:\t1", "Seccomp:\t2"} <= {*told(copy, "status").splitlines()}
        endless.cancel()
        await asyncio.wait([endless])
        assert not alive(copy)
        assert isinstance(await inspect("pt2"), Inspected)
        os.kill(forks._process.pid, signal.SIGKILL)
        assert isinstance(await inspect("pt2"), Inspected)
    finally:
        forks.close()


@pytest.mark.slow
@pytest.mark.torch
def test_an_exported_program_runs_on_torch_and_converted(confined, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    (tmp_path / "files").mkdir()
    confined.inspect(tiny_models.exported(tmp_path / "files" / "m.pt2", torch), format="pt2")
    (found,) = confined.of(ModelInspected)
    assert (found.frameworks, found.operators) == ({"ort": "", "torch": ""}, ["linear", "relu"])
    assert found.baseline_accuracy == 1.0
    confined.build(plan(), plan(framework="torch", format="pt2"), format="pt2")
    built = {one.plan.framework: one for one in confined.of(VariantBuilt)}
    assert set(built) == {"ort", "torch"}
    assert built["ort"].agreement == built["torch"].agreement == 1.0
    assert built["torch"].artifact != found.source  # never the upload itself


@pytest.mark.slow
@pytest.mark.torch
def test_a_program_exported_for_single_items_stays_with_them(confined, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "files").mkdir()
    content = tiny_models.exported(tmp_path / "files" / "m.pt2", torch, batch=1)
    (found,) = confined.inspect(content, format="pt2").of(ModelInspected)
    assert found.fixed_batch
    content = tiny_models.exported(tmp_path / "files" / "m.pt2", torch, batch=5)
    assert "exactly 5" in confined.inspect(content, format="pt2").reason


# -- a remote engine, through the relay of a sandbox without network


@pytest.fixture(scope="module")
def stock():
    with engine() as made:
        yield made


@pytest.fixture
def remote(stock, tmp_path) -> Shop:
    stock.mode, stock.extensions, stock.most, stock.batched = "", ["binary_tensor_data"], 0, True
    return Shop(tmp_path, devices={"remote": f"127.0.0.1:{stock.port}"})


def named(url: str) -> bytes:
    return json.dumps({"url": url}).encode()


def remote_plan(most: int) -> VariantPlan:
    return replace(plan("native", framework="remote", most=most, format="remote"), hardware="remote")


def inspect_remote(shop: Shop, url: str) -> Shop:
    return shop.inspect(named(url), format="remote", hardware="remote")


@pytest.mark.parametrize("extensions", [["binary_tensor_data"], []])
def test_a_remote_engine_is_measured_like_any_model(stock, remote, extensions):
    stock.extensions = extensions
    (found,) = inspect_remote(remote, stock.url("tiny")).of(ModelInspected)
    assert (found.baseline_accuracy, found.fixed_batch, found.most_batch) == (1.0, False, 0)
    assert (found.signature.inputs[0].shape, found.signature.outputs[0].shape) == ([16], [4])
    assert found.frameworks == {"remote": ""}
    remote.build(remote_plan(1), remote_plan(4), format="remote")
    assert remote.reason is None
    one, four = remote.of(VariantBuilt)
    assert [row.batch for row in four.profile.rows] == [1, 2, 4]
    assert (four.accuracy, four.agreement, four.profile.memory_mb) == (1.0, 1.0, 0.0)
    assert four.profile.host["engine"] == f"127.0.0.1:{stock.port}"
    assert one.profile.saturation_qps > 0
    assert json.loads(remote.kept[four.artifact]) == {"url": stock.url("tiny")}


def test_no_batch_is_larger_than_the_engine_takes(stock, remote):
    stock.most = 4
    (found,) = inspect_remote(remote, stock.url("tiny")).of(ModelInspected)
    assert (found.most_batch, found.fixed_batch) == (4, False)
    remote.build(remote_plan(4), remote_plan(8), format="remote")
    (done,), (not_done,) = remote.of(VariantBuilt), remote.of(VariantFailed)
    assert done.plan.max_batch == 4
    assert "batch of 8" in not_done.reason
    stock.batched = False
    (found,) = inspect_remote(remote, stock.url("tiny")).of(ModelInspected)
    assert found.fixed_batch


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost:{port}/v2/models/tiny", "executor.remote_hosts"),
        ("http://127.0.0.1:1/v2/models/tiny", "executor.remote_hosts"),
        ("http://169.254.169.254/v2/models/tiny", "executor.remote_hosts"),
        ("http://127.0.0.1:{port}/admin", "URL of a model"),
        ("http://127.0.0.1:{port}/v2/models/none", "answered 404"),
    ],
)
def test_an_engine_that_is_none_is_refused_with_the_reason(stock, remote, url, words):
    assert words in inspect_remote(remote, url.format(port=stock.port)).reason


@pytest.mark.parametrize(
    ("mode", "words"),
    [("error", "on fire"), ("redirect", "redirects"), ("many", "rows"), ("nan", "NaN"), ("garbage", "read")],
)
def test_an_engine_that_answers_badly_is_no_model(stock, remote, mode, words):
    stock.mode = mode
    assert words in inspect_remote(remote, stock.url("tiny")).reason


def test_a_worker_without_hosts_refuses_it(stock, shop):
    assert "no device of kind remote" in inspect_remote(shop, stock.url("tiny")).reason


@pytest.mark.slow
def test_the_best_cascade_is_built_as_any_variant_and_none_that_costs_more_than_it_may(shop) -> None:
    small, large = tiny_models.pair()
    shop.inspect(large, npz(x=X, y=Y))
    keys = [hashlib.sha256(one).hexdigest() for one in (small, large)]
    shop.kept[keys[0]] = small
    parts = Cascade(parts=["small", "large"], versions=[("small", "1"), ("m", "1")])
    tried = CascadePlan(plan=plan("cascade"), cascade=parts, artifacts=keys, costs=(0.0, 1.0), most=0.9)
    (built,) = shop.build(cascades=[replace(tried, most=1e-9), tried]).of(VariantBuilt)
    assert built.cascade == replace(parts, threshold=built.cascade.threshold, share=built.cascade.share)
    assert 0.0 < built.cascade.share < 0.9
    assert (built.accuracy, built.agreement, built.plan) == (1.0, None, tried.plan)
    assert built.profile.rows[0].p99_ms >= built.profile.rows[0].p50_ms
    assert built.artifact in shop.kept
    assert not shop.build(cascades=[replace(tried, costs=(0.0, 1e-9), most=1e-8)]).of(VariantBuilt), "it costs more"
    assert shop.reason is None
