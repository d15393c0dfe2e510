"""A remote engine as a variant, over real connections: what it answers, what is wrong with its answers, and that it may go and come back."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bus.datatypes import ARRAYS
from bus.messages.public import TensorView
from bus.tensors import to_array
from services.executor.backends import backend
from services.executor.backends.base import (
    BackendUnavailable,
    Cancelled,
    Handle,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
)
from services.executor.backends.remote import (
    RemoteBackend,
    error_of,
    infer_outputs,
    infer_request,
    model_of,
    offers_binary,
)
from services.executor.backends.remote_http import SILENCE_S
from services.gateway.oip.infer import read
from tests.support.data.events import floats
from tests.support.servers.engine import StockEngine, engine

SIGNATURE = floats({"x": [4]}, {"y": [4]})
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def started() -> Iterator[StockEngine]:
    with engine() as made:
        yield made


@pytest.fixture
def stock(started: StockEngine) -> StockEngine:
    started.mode, started.extensions, started.seen, started.headers = "", ["binary_tensor_data"], [], {}
    return started


def loaded(stock: StockEngine, directory: Path, **more: str) -> Handle:
    path = directory / "engine.remote"
    path.write_text(json.dumps({"url": stock.url()}))
    spec = LoadSpec(format="remote", device=f"other.test 127.0.0.1:{stock.port}", signature=SIGNATURE)
    return backend("remote").load(path, spec)


@pytest.fixture
def handle(stock: StockEngine, tmp_path: Path) -> Iterator[Handle]:
    made = loaded(stock, tmp_path)
    yield made
    made.close()


def test_raw_tensors_where_the_engine_takes_them(stock: StockEngine, handle: Handle) -> None:
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)
    assert np.array_equal(handle.run_single(X[:1])[0], 2 * X[:1])
    assert [path for path, _ in stock.seen] == ["/v2", *["/v2/models/double/infer"] * 2]
    assert stock.seen[-1][1] is not None
    assert handle.proof == f"a remote engine at 127.0.0.1:{stock.port}"


def test_numbers_where_it_takes_none(stock: StockEngine, handle: Handle) -> None:
    stock.extensions = []
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)
    assert stock.seen[-1] == ("/v2/models/double/infer", None)


def test_nothing_is_sent_but_the_request(stock: StockEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:word@127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://user:word@127.0.0.1:1")
    handle = loaded(stock, tmp_path)
    handle.run({"x": X})
    handle.close()
    assert sorted(stock.headers) == [
        "accept-encoding", "content-length", "content-type", "host", "inference-header-content-length", "user-agent",
    ]  # fmt: skip
    assert stock.headers["host"] == f"127.0.0.1:{stock.port}"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("error", "answered 503: the model is on fire"),
        ("page", "answered 504"),
        ("redirect", "redirects"),
        ("garbage", "cannot be read"),
        ("nested", "cannot be read"),
        ("gzip", "coding"),
        ("many", "6 rows of output 'y' for 3 items"),
        ("wide", r"FP32\[3, 8\], not as FP32\[n, 4\]"),
        ("type", "output 'y'.*no tensor"),
        ("name", "returned z; the outputs are y"),
        ("negative", "output 'y'"),
        ("scalar", "output 'y'"),
        ("ragged", "output 'y'"),
        ("cut", "cut off"),
        ("longhead", "another length"),
    ],
)
def test_a_bad_answer_costs_one_run(stock: StockEngine, handle: Handle, mode: str, words: str) -> None:
    handle.run({"x": X})
    stock.mode = mode
    before = len(stock.seen)
    with pytest.raises(RunFailed, match=words):
        handle.run({"x": X})
    assert [path for path, _ in stock.seen[before:]] == ["/v2/models/double/infer"], "a redirect was followed"
    stock.mode = ""
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)


@pytest.mark.parametrize("mode", ["hang", "drip"])
def test_a_run_that_takes_too_long_is_cancelled(stock: StockEngine, handle: Handle, mode: str) -> None:
    handle.run({"x": X})
    stock.mode = mode
    threading.Timer(0.3, handle.cancel).start()
    started = time.monotonic()
    with pytest.raises(Cancelled, match="took too long"):
        handle.run({"x": X})
    assert time.monotonic() - started < SILENCE_S, "it is not waited until the engine has been silent for too long"
    stock.mode = ""
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)


def test_an_engine_may_go_and_come_back(stock: StockEngine, handle: Handle) -> None:
    handle.run({"x": X})
    stock.stop()
    try:
        for _ in range(2):
            with pytest.raises(RunFailed, match=rf"127\.0\.0\.1:{stock.port} cannot be used: connection refused"):
                handle.run({"x": X})
    finally:
        stock.start()
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)


def test_an_engine_that_has_closed_the_connection_meanwhile_gets_another_one(
    stock: StockEngine, handle: Handle
) -> None:
    handle.run({"x": X})
    stock.stop()
    stock.start()
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)


def test_it_loads_without_the_engine(tmp_path: Path) -> None:
    absent = StockEngine()
    handle = loaded(absent, tmp_path)
    with pytest.raises(RunFailed, match="connection refused"):
        handle.run({"x": X})
    absent.start()
    assert np.array_equal(handle.run({"x": X})["y"], 2 * X)
    absent.stop()
    handle.close()
    with pytest.raises(RunFailed, match="no longer loaded"):
        handle.run({"x": X})


def test_many_at_once_do_one_another_no_harm(stock: StockEngine, tmp_path: Path) -> None:
    """Each instance has a connection of its own."""
    right = []
    handles = [loaded(stock, tmp_path) for _ in range(8)]

    def work(number: int) -> None:
        handle = handles[number]
        for i in range(20):
            x = np.full((1 + i % 3, 4), number * 100 + i, np.float32)
            right.append(np.array_equal(handle.run({"x": x})["y"], 2 * x))
        handle.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 160


def test_wrong_names_are_the_callers_fault(handle: Handle) -> None:
    for wrong in ({"z": X}, {}, {"x": X, "z": X}):
        with pytest.raises(InputRejected):
            handle.run(wrong)


# -- which URLs

HOSTS = "engine.test:8000 10.1.2.3 [::1]:9000"


@pytest.mark.parametrize(
    "url",
    [
        "http://engine.test:8000/v2/models/m",
        "https://ENGINE.test:8000/v2/models/m/",
        "http://10.1.2.3:1/v2/models/m/versions/2",
        "http://10.1.2.3/some/where/v2/models/a.b-c",
        "http://[::1]:9000/v2/models/m",
    ],
)
def test_models_on_hosts_that_the_operator_names(tmp_path: Path, url: str) -> None:
    path = tmp_path / "engine.remote"
    path.write_text(json.dumps({"url": url}))
    handle = RemoteBackend().load(path, LoadSpec(format="remote", device=HOSTS, signature=SIGNATURE))
    assert handle.inputs == ("x",)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://engine.test/v2/models/m", "have the operator add engine.test or engine.test:80 to"),
        ("http://sub.engine.test:8000/v2/models/m", "no host that the operator names"),
        ("http://127.0.0.1:9000/v2/models/m", "no host"),
        ("http://169.254.169.254/v2/models/m", "no host"),
        ("http://[::ffff:10.1.2.3]/v2/models/m", "no host"),
        ("http://167838211/v2/models/m", "no host name"),
        ("http://10.1.2.3@other.test/v2/models/m", "user or password"),
        ("http://user:word@10.1.2.3/v2/models/m", "user or password"),
        ("ftp://10.1.2.3/v2/models/m", "only http"),
        ("10.1.2.3/v2/models/m", "only http"),
        ("http://10.1.2.3/", "URL of a model"),
        ("http://10.1.2.3/v2/models/m/infer", "URL of a model"),
        ("http://10.1.2.3/v2/models/../../m", "URL of a model"),
        ("http://10.1.2.3/v2/models/m?x=1", "URL of a model"),
        ("http://10.1.2.3/v2/models/%2e%2e", "URL of a model"),
        ("http://10.1.2.3/v2/models/a%2f..%2fb", "URL of a model"),
        ("http://10.1.2.3/v2/models/.", "URL of a model"),
        ("http://10.1.2.3/../v2/models/m", "URL of a model"),
        ("http://10.1.2.3/latest/meta-data", "URL of a model"),
    ],
)
def test_urls_that_are_refused(tmp_path: Path, url: str, words: str) -> None:
    path = tmp_path / "engine.remote"
    path.write_text(json.dumps({"url": url}))
    with pytest.raises(LoadFailed, match=f"url: .*{words}"):
        RemoteBackend().load(path, LoadSpec(format="remote", device=HOSTS, signature=SIGNATURE))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"url": 3}', '{"url": "http://10.1.2.3/v2/models/m", "x": 1}', "x" * 5000]
)
def test_files_that_name_no_engine(tmp_path: Path, text: str) -> None:
    path = tmp_path / "engine.remote"
    path.write_text(text)
    with pytest.raises(LoadFailed, match="file of a remote engine"):
        RemoteBackend().load(path, LoadSpec(format="remote", device=HOSTS, signature=SIGNATURE))


def test_without_hosts_there_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"executor\.remote_hosts"):
        RemoteBackend().probe("cpu")
    assert RemoteBackend().probe(HOSTS)
    path = tmp_path / "engine.remote"
    path.write_text(json.dumps({"url": "http://cpu/v2/models/m"}))
    with pytest.raises(LoadFailed, match=r"executor\.remote_hosts"):
        RemoteBackend().load(path, LoadSpec(format="remote", device="cpu", signature=SIGNATURE))


# -- Bodies of the Open Inference Protocol, read back by the gateway's own reader; descriptions and replies that are wrong.
SHAPES = arrays.array_shapes(max_dims=3, max_side=4)
NUMBERS = st.sampled_from(sorted(set(ARRAYS))).flatmap(
    lambda name: arrays.arrays(
        name, SHAPES, elements={"allow_nan": False, "allow_infinity": False} if "f" in name else None
    )
)
TEXTS = arrays.arrays(object, SHAPES, elements=st.text(max_size=5), fill=st.nothing())


@given(first=NUMBERS | TEXTS, second=NUMBERS, binary=st.booleans())
def test_a_server_reads_what_is_sent(first: np.ndarray, second: np.ndarray, binary: bool) -> None:
    body, head = infer_request({"a": first, "b": second}, ("y", "z"), binary=binary)
    asked = read(body, head, None)
    for name, sent in (("a", first), ("b", second)):
        fields = asked.inputs[name]
        found = to_array(TensorView(fields["datatype"], list(fields["shape"]), memoryview(fields["data"])), name)
        assert (found.shape, found.tolist()) == (sent.shape, sent.tolist())
    assert asked.outputs == {"y": binary, "z": binary}


def reply(raw: dict[str, np.ndarray], listed: dict[str, np.ndarray]) -> tuple[bytes, int | None]:
    """As a server writes it."""

    def spec(name: str, array: np.ndarray) -> dict[str, object]:
        return {"name": name, "datatype": ARRAYS[array.dtype.str], "shape": list(array.shape)}

    outputs = [{**spec(n, a), "parameters": {"binary_data_size": a.nbytes}} for n, a in raw.items()]
    outputs += [{**spec(n, a), "data": a.tolist()} for n, a in listed.items()]
    text = msgspec.json.encode({"model_name": "m", "outputs": outputs})
    return text + b"".join(a.tobytes() for a in raw.values()), len(text) if raw else None


@given(raw=NUMBERS, other=NUMBERS, listed=NUMBERS)
def test_the_outputs_of_a_reply(raw: np.ndarray, other: np.ndarray, listed: np.ndarray) -> None:
    for some, rest in (({"r": raw, "o": other}, {"l": listed}), ({}, {"l": listed, "r": raw})):
        found = infer_outputs(*reply(some, rest))
        for name, array in {**some, **rest}.items():
            assert np.array_equal(found[name], array), name
            assert found[name].dtype == array.dtype


@given(body=st.binary(max_size=200), head=st.none() | st.integers(-5, 300))
def test_bytes_that_are_no_reply_are_one_failed_run(body: bytes, head: int | None) -> None:
    with pytest.raises(RunFailed, match="reply"):
        infer_outputs(body, head)


@given(data=st.data())
def test_a_reply_that_is_cut_off_anywhere_is_one_failed_run(data: st.DataObject) -> None:
    body, head = reply({"y": np.ones((3, 4), "<f4")}, {})
    at = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(RunFailed):
        infer_outputs(body[:at], head)


@pytest.mark.parametrize(
    "output",
    [
        {"datatype": "FP32", "shape": [2], "data": [1.0]},
        {"datatype": "FP32", "shape": [-1], "data": [1.0]},
        {"datatype": "FP32", "shape": [], "data": [1.0]},
        {"datatype": "FP32", "shape": [1], "data": ["a"]},
        {"datatype": "FP32", "shape": [1]},
        {"datatype": "INT8", "shape": [1], "data": [300]},
        {"datatype": "UINT64", "shape": [1], "data": [-1]},
        {"datatype": "FLOAT", "shape": [1], "data": [1]},
        {"datatype": "BYTES", "shape": [1], "data": [1]},
        {"datatype": "FP32", "shape": [2, 2], "data": [[1.0], [1.0, 2.0]]},
        {"datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "4"}},
    ],
)
def test_an_output_that_is_no_tensor_is_named(output: dict[str, object]) -> None:
    with pytest.raises(RunFailed, match="output 'y'"):
        infer_outputs(json.dumps({"outputs": [{"name": "y", **output}]}).encode(), None)


def test_engines_say_what_they_offer_and_of_models() -> None:
    body = json.dumps({"outputs": [{"name": "y", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["é"]]}]})
    assert infer_outputs(body.encode(), None)["y"].tolist() == [["a"], ["é"]]
    assert offers_binary(b'{"name":"t","extensions":["classification","binary_tensor_data"]}')
    assert not any(map(offers_binary, (b'{"name":"t"}', b'{"extensions":null}', b"", b"[1]")))
    assert error_of(b'{"error": "no such\\nmodel"}') == "no such model"
    assert not any(map(error_of, (b"<html>", b'{"error": 3}', b"")))
    found = model_of(metadata([-1, 4, -1]), b'{"max_batch_size": 16, "name": "m"}')
    assert (found.fixed, found.most) == (False, 16)
    (x,), (y,) = found.signature.inputs, found.signature.outputs
    assert (x.name, x.datatype, x.shape) == ("x", "FP32", [4, -1])
    assert (y.name, y.shape) == ("y", [3])
    assert model_of(metadata([1, 4]), None).fixed
    assert model_of(metadata([-1, 4]), b'{"max_batch_size": 1}').fixed
    assert model_of(metadata([-1, 4]), b"no json").most == 0


def metadata(shape: list[int], datatype: str = "FP32") -> bytes:
    return json.dumps(
        {
            "name": "m",
            "inputs": [{"name": "x", "datatype": datatype, "shape": shape}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        }
    ).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "cannot be read"),
        (b"{}", "inputs and outputs"),
        (metadata([16]), "must count items"),
        (metadata([]), "must count items"),
        (metadata([-1, 0]), "lengths"),
        (metadata([-1, -2]), "lengths"),
        (metadata([-1], "BF16"), "not supported"),
        (metadata([-1], "FLOAT"), "not supported"),
    ],
)
def test_descriptions_that_do_not_do(body: bytes, words: str) -> None:
    with pytest.raises(LoadFailed, match=words):
        model_of(body, None)
