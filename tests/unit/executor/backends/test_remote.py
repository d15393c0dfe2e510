"""A remote engine as a variant, over real connections: what it answers, what is wrong with its answers, and that it may go and come back."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bus.messages.catalog import Signature, TensorSpec
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
from services.executor.backends.remote import RemoteBackend
from services.executor.backends.remote_http import SILENCE_S
from tests.support.servers.engine import StockEngine, engine

SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[4])],
    outputs=[TensorSpec(name="y", datatype="FP32", shape=[4])],
)
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
