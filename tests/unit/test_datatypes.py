"""The table of datatypes at every door: a datatype works there, or is refused by its name. A new row is asked for everywhere."""

import io
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.codec import decode, encode
from bus.datatypes import DATATYPES, SIZES, converts, same_kind
from bus.messages.catalog import AppRecord, Signature, TensorSpec
from bus.messages.flow import Route
from bus.messages.jobs import Checkpoint, Position
from bus.messages.public import QueryHead, Tensor, TensorView
from bus.tensors import datatype_of, dtype_of, fit, from_array, to_array
from bus.values import packed, to_list
from dashboard import inputs as typed
from infaas.inputs import random_items
from infaas.queries import encode_inputs
from infaas.trial import try_file
from services.core.emulation import zeros
from services.core.ensemble.base import Member
from services.core.ensemble.outputs import combined, label_error
from services.core.validation import count_items
from services.dispatcher.default_output import default_outputs
from services.executor.backends.base import checked_outputs
from services.executor.backends.remote import infer_outputs, infer_request, model_of
from services.executor.edge import single, split
from services.executor.queue import QueuedQuery
from services.executor.workshop.sandbox.protocol import UploadRejected
from services.gateway.clipper.bodies import tensors_of
from services.gateway.oip import infer
from services.gateway.oip.models import ServedModel, config
from services.gateway.rafiqi import tensor_of
from services.gateway.rpc.infer import INFERENCE, fill, to_data
from services.jobs.formats import open_reader, rendered
from tests.support.models import tiny_models
from tests.support.simulated.registrations import model_record

ROOT = Path(__file__).parents[2]
SAMPLES: dict[str, list[Any]] = {"b": [True, False], "i": [-1, 2], "u": [1, 2], "f": [0.5, -2.0], "O": ["a", "é"]}


def sample(datatype: str) -> list[Any]:
    """Two elements: those of one item."""
    return SAMPLES[DATATYPES[datatype].kind]


def spec(datatype: str) -> TensorSpec:
    return TensorSpec(name="x", datatype=datatype, shape=[2])


def signature(datatype: str) -> Signature:
    return Signature(inputs=[spec(datatype)], outputs=[spec(datatype)])


def app(datatype: str) -> AppRecord:
    return AppRecord(app="a", links={}, signature=signature(datatype))


def array(datatype: str) -> Any:
    return np.array([sample(datatype)], DATATYPES[datatype].array)


def wire(datatype: str) -> TensorView:
    return TensorView(datatype, [1, 2], memoryview(packed(datatype, sample(datatype))))


def said(tensor: Any) -> list[Any]:
    """The elements of a tensor in any form, as a model of this datatype gets them."""
    return to_array(msgspec.convert(tensor, Tensor) if isinstance(tensor, dict) else tensor, "x").ravel().tolist()


def client(datatype: str) -> None:
    sent = decode(TensorView, encode_inputs(array(datatype)))
    assert same_kind(sent.datatype, datatype)
    assert said(sent) == said(wire(datatype)) == sample(datatype)


def dispatcher(datatype: str) -> None:
    assert count_items(decode(QueryHead, encode({"inputs": wire(datatype)})), app(datatype)) == 1


def executor(datatype: str) -> None:
    query = QueuedQuery(
        Route(b"u", 0, 0, "", 1.0, 0.0, "d", "i", "a", 1, None), msgspec.Raw(b""), wire(datatype), 1, None
    )
    batch = single([query, query], spec(datatype))
    assert batch.dtype == dtype_of(datatype)
    answers = split([batch], ("y",), [query, query])
    assert [said(answer["y"]) for answer in answers] == [sample(datatype)] * 2


def container(datatype: str) -> None:
    found = checked_outputs({"x": array(datatype)}, signature(datatype), 1, "it")
    assert found["x"].dtype == dtype_of(datatype)


def default_output(datatype: str) -> None:
    found = default_outputs(sample(datatype), signature(datatype), 2)
    assert found is not None
    if datatype == "BYTES":  # a list of texts is one text of JSON
        assert json.loads(said(found["x"])[0]) == sample(datatype)
    else:
        assert (found["x"].datatype, said(found["x"])) == (datatype, sample(datatype) * 2)


def ensemble(datatype: str) -> None:
    outputs = {"y": array(datatype)[0, :1]}
    members = [Member(model=name, version="1") for name in "ab"]
    both = combined({"a": 1.0, "b": 1.0}, members, {"a": outputs, "b": outputs})
    assert both.outputs["y"].tolist() == sample(datatype)[:1]
    label_error(1, [model_record(signature=signature(datatype))])


def rest(datatype: str) -> None:
    for data in (sample(datatype), [sample(datatype)]):
        one = {"name": "x", "datatype": datatype, "shape": [1, 2], "data": data}
        assert said(infer.read(json.dumps({"inputs": [one]}).encode(), None, None).inputs["x"]) == sample(datatype)
    raw = bytes(wire(datatype).data)
    one = {"name": "x", "datatype": datatype, "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [one]}).encode()
    assert said(infer.read(text + raw, len(text), None).inputs["x"]) == sample(datatype)
    assert to_list(wire(datatype), "x") == sample(datatype)


def grpc_contents(datatype: str) -> None:
    contents = INFERENCE.InferTensorContents()
    if DATATYPES[datatype].contents:
        fill(contents, wire(datatype))
    assert to_data(contents, datatype, [1, 2], "x") == bytes(wire(datatype).data)


def model_configuration(datatype: str) -> None:
    known = INFERENCE.descriptor.enum_types_by_name["DataType"].values_by_name
    assert config(ServedModel("a", signature(datatype), [], (), ""))["input"][0]["data_type"] in known


def clipper(datatype: str) -> None:
    items = sample(datatype)[:1] if datatype == "BYTES" else [[abs(int(one)) for one in sample(datatype)]]
    taken = spec(datatype) if datatype != "BYTES" else TensorSpec(name="x", datatype=datatype, shape=[1])
    one = AppRecord(app="a", links={}, signature=Signature(inputs=[taken], outputs=[]))
    sent = to_array(Tensor(**tensors_of(one, items)["x"]), "x")
    assert fit(sent, taken, "x").dtype == dtype_of(datatype)


def rafiqi(datatype: str) -> None:
    for body in (
        json.dumps(sample(datatype)).encode(),
        bytes(wire(datatype).data) if SIZES[datatype] else b'["a", "b"]',
    ):
        sent = to_array(Tensor(**tensor_of(body, spec(datatype))), "x")
        assert fit(sent, spec(datatype), "x").shape == (1, 2)


def identity(datatype: str) -> bytes:
    kind = DATATYPES[datatype].onnx
    return tiny_models.made(f"({kind}[n, 2] x) => ({kind}[n, 2] y) {{y = Identity(x)}}")


def registration(datatype: str) -> None:
    import onnx

    from services.executor.workshop.tasks import onnx_files

    found = onnx_files.signature(onnx.load_model_from_string(identity(datatype)))
    assert [one.datatype for one in (*found.inputs, *found.outputs)] == [datatype] * 2


def trial(datatype: str, directory: Path) -> None:
    path = directory / f"{datatype}.onnx"
    path.write_bytes(identity(datatype))
    found = try_file(path, {"x": array(datatype)})
    assert found is not None
    if found.failed:
        raise ValueError(found.failed)
    assert [one.datatype for one in (*found.inputs, *found.outputs)] == [datatype] * 2
    assert found.answers["y"].tolist() == sample(datatype)


def torch_program(datatype: str) -> None:
    torch = pytest.importorskip("torch")
    from services.executor.workshop.tasks import torch_files

    kind = getattr(torch, DATATYPES[datatype].torch, None)
    if kind is None:
        pytest.skip("no tensor of torch is of it")
    assert torch_files._tensor("x", torch.zeros((1, 2), dtype=kind))[0].datatype == datatype


def job_lines(datatype: str) -> None:
    line = json.dumps(sample(datatype)).encode() + b"\n"
    cut = open_reader("jsonl", io.BytesIO(line), len(line), signature(datatype)).cut(Position(), 0, 1, 2**20)
    sent = decode(TensorView, cut.body)
    assert (sent.datatype, said(sent)) == (datatype, sample(datatype))
    outputs = {"y": Tensor(datatype, [1, 2], bytes(wire(datatype).data))}
    text, _ = rendered("jsonl", outputs, 1, Checkpoint(), 1)
    assert json.loads(text) == {"y": sample(datatype)}


def job_objects(datatype: str) -> None:
    data = encode(Tensor(datatype, [1, 2], bytes(wire(datatype).data)))
    cut = open_reader("msgpack", io.BytesIO(data), len(data), signature(datatype)).cut(Position(), 0, 1, 2**20)
    assert said(decode(TensorView, cut.body)) == sample(datatype)


def job_arrays(datatype: str) -> None:
    outputs = {"y": Tensor(datatype, [1, 2], bytes(wire(datatype).data))}
    data, _ = rendered("npy", outputs, 1, Checkpoint(), 1)
    assert np.load(io.BytesIO(data)).tolist() == [sample(datatype)]
    cut = open_reader("npy", io.BytesIO(data), len(data), signature(datatype)).cut(Position(), 0, 1, 2**20)
    assert said(decode(TensorView, cut.body)) == sample(datatype)


def dashboard(datatype: str) -> None:
    given = [spec(datatype)]
    for found in (typed.made_up(given, 0), typed.from_json(typed.example(given), given)):
        assert typed.named(found, given)["x"].dtype == dtype_of(datatype)


def made_up(datatype: str) -> None:
    found = fit(random_items([spec(datatype)], 3, np.random.default_rng(0))["x"], spec(datatype), "x")
    assert found.shape == (3, 2)


def remote_engine(datatype: str) -> None:
    one = {"name": "x", "datatype": datatype, "shape": [-1, 2]}
    assert model_of(json.dumps({"inputs": [one], "outputs": [one]}).encode(), None).signature == signature(datatype)
    for binary in (True, False):
        body, head = infer_request({"x": array(datatype)}, ("x",), binary=binary)
        assert said(infer.read(body, head, None).inputs["x"]) == sample(datatype)
    reply = json.dumps({"outputs": [{**one, "shape": [1, 2], "data": sample(datatype)}]}).encode()
    assert infer_outputs(reply, None)["x"].dtype == dtype_of(datatype)


def simulated_device(datatype: str) -> None:
    (tensor,) = zeros([spec(datatype)], 3).values()
    assert to_array(tensor, "x").shape == (3, 2)


DOORS: list[Callable[..., None]] = [
    client, dispatcher, executor, container, default_output, ensemble, rest, grpc_contents, model_configuration, clipper, rafiqi,
    registration, trial, torch_program, job_lines, job_objects, job_arrays, dashboard, made_up, remote_engine, simulated_device,
]  # fmt: skip
REFUSED = {
    grpc_contents: {"FP16", "BF16"},  # the protocol has no field for them: they are sent raw
    registration: {"BF16"},  # no array holds what such a model takes
    trial: {"BF16"},
    torch_program: {"BF16"},
    remote_engine: {"BF16"},
    job_arrays: {"BF16", "BYTES"},  # numpy has none, and texts of any length
}


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_it_works_or_is_refused_by_name(door: Callable[..., None], datatype: str, tmp_path: Path) -> None:
    given = (datatype, tmp_path) if door is trial else (datatype,)
    if datatype not in REFUSED.get(door, ()):
        door(*given)
        return
    row = DATATYPES[datatype]
    with pytest.raises((ValueError, RuntimeError, UploadRejected)) as refused:
        door(*given)
    assert any(name in str(refused.value) for name in (datatype, row.onnx, row.onnx.upper()) if name)


def test_a_row_says_how_many_bytes_its_elements_take() -> None:
    for name, row in DATATYPES.items():
        assert len(packed(name, sample(name))) == 2 * row.size or row.kind == "O"
        assert not row.code or row.size == np.dtype(row.array).itemsize
        assert datatype_of(np.zeros(1, row.array)) == name or not row.code


def test_what_one_is_converted_to_is_what_arrays_can_be_fitted_to() -> None:
    """Zeros and ones fit whatever is converted. What is taken by its kind is converted, too."""
    for given, wanted in product(DATATYPES, repeat=2):
        source = np.array([["0"]], object) if given == "BYTES" else np.zeros((1, 1), DATATYPES[given].array)
        try:
            fit(to_array(from_array(source), "x"), TensorSpec(name="x", datatype=wanted, shape=[1]), "x")
            fitted = True
        except ValueError:
            fitted = False
        assert fitted == converts(given, wanted), (given, wanted)
        assert fitted or not same_kind(given, wanted), (given, wanted)


def test_documents_and_examples_name_all_of_them() -> None:
    schemas = json.loads((ROOT / "services/gateway/openapi.json").read_text())["components"]["schemas"]
    assert schemas["TensorMetadata"]["properties"]["datatype"]["enum"] == list(DATATYPES)
    assert f"Open Inference Protocol datatype: {', '.join(DATATYPES)}" in (ROOT / "docs/asyncapi.yaml").read_text()
    said = re.search(r"All datatypes of the protocol work: (.*?)\.", (ROOT / "docs/gateway.md").read_text())
    ranges = re.sub(r"(U?INT)8 to \1(64)", r"\g<1>8, \g<1>16, \g<1>32, \g<1>64", said[1])
    assert set(ranges.split(", ")) == set(DATATYPES)
    script = (ROOT / "examples/javascript/infaas.mjs").read_text()
    table = re.search(r"const TYPES = \{(.*?)\};", script, re.DOTALL)
    arrays = dict(re.findall(r"(\w+): (\w+Array)", table[1]))
    rest = re.search(r"// (.*) stay bytes", script)
    assert {*arrays, *rest[1].split(" and "), "BYTES"} == set(DATATYPES)
    for name, kind in arrays.items():  # as Float32Array, BigUint64Array: so many bits
        bits = re.search(r"\d+", kind)
        assert int(bits[0]) == 8 * SIZES[name]
