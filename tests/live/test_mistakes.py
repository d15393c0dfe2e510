"""The mistakes of a newcomer: what is done, and what is told. Each is one line on stderr that names what is wrong and what to do."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import infaas as library
from infaas.cli import INTERRUPTED, main
from infaas.demo import digits
from tests.support.servers.processes import environ, infaas
from tests.support.servers.system import Whole

FAILED, USAGE = 1, 2


class Place(NamedTuple):
    """A newcomer's directory with files, most of them wrong, and a running system."""

    files: Path
    system: Whole


@pytest.fixture(scope="module")
def place(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    files = tmp_path_factory.mktemp("newcomer")
    x, y = system.x, system.y
    with_nan = x[:3].copy()
    with_nan[1, 5] = np.nan
    arrays = {
        "ok": x[:3],
        "narrow": x[:3, :100],
        "words": np.array([["a"] * 784]),
        "none": x[:0],
        "nan": with_nan,
        "many": np.zeros((70_000, 2), "float32"),
    }
    for name, array in arrays.items():
        np.save(files / f"{name}.npy", array)
    np.save(files / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(files / "two.npz", a=x[:2], b=x[:2])
    validations = {
        "validation": {"x": x[:200], "y": y[:200]},
        "unlabelled": {"x": x[:200]},
        "labels-only": {"y": y[:200]},
        "short": {"x": x[:200], "y": y[:100]},
        "other-shape": {"x": x[:200, :100], "y": y[:200]},
        "other-classes": {"x": x[:200], "y": y[:200] + 90},
    }
    for name, one in validations.items():
        np.savez(files / f"{name}.npz", **one)
    texts = {
        "fake.onnx": "this is no model",
        "empty.onnx": "",
        "model.pkl": "pickled",
        "model.h5": "keras",
        "fake.npz": "no archive",
        "bad.toml": "[dispatcher\n",
        "key.toml": "[dispatcher]\ncuont = 3\n",
        "value.toml": "[dispatcher]\ncount = 'three'\n",
        "selects.toml": '[dispatcher]\npolicy = "collections:Counter"\n',
        "scales.toml": '[autoscaler]\npolicy = "collections:Counter"\n',
        "file": "",
    }
    for name, text in texts.items():
        (files / name).write_text(text)
    shutil.copy(digits.models()["mlp-s"], files / "model.onnx")
    for folder, text in (("spark", "flavors:\n  spark:\n    data: m\n"), ("plain", "")):
        (files / folder).mkdir()
        (files / folder / ("MLmodel" if text else "file")).write_text(text)
    yield Place(files, system)


REGISTER = "register model.onnx --app new --model m --validation"
QUERY = "query --app digits --input"
# What is done, the exit code, and what is told.
MISTAKES: list[tuple[str, int, str]] = [
    # the command line; tests/unit/infaas/cli/test_main.py has what needs no system
    ("query digits", USAGE, "give the inputs with either --input FILE or --json-input JSON"),
    ("query --input ok.npy", USAGE, r"name an app, as in infaas query APP, or a registered model"),
    ("bench --app digits --rate -4", USAGE, "--rate. Must be > 0"),
    ("settings dispacher", USAGE, "there is no section 'dispacher': .* did you mean dispatcher"),
    # inputs
    (f"{QUERY} missing.npy", FAILED, "cannot read missing.npy: No such file"),
    (f"{QUERY} fake.onnx", FAILED, "fake.onnx is no plain numpy array .* save numbers or strings"),
    (f"{QUERY} objects.npy", FAILED, "objects.npy is no plain numpy array .* save numbers or strings"),
    (f"{QUERY} two.npz --input-key z", FAILED, "two.npz has no array 'z', only a, b"),
    (f"{QUERY} two.npz", FAILED, "inputs lacks 'x': the app takes x"),
    (f"{QUERY} narrow.npy", FAILED, r"has shape \[3, 100\]: the model takes \[n, 784\]"),
    (f"{QUERY} many.npy", FAILED, r"has shape \[70000, 2\]: the model takes \[n, 784\]|at most"),
    (f"{QUERY} words.npy", FAILED, "the model takes FP32, so give numbers"),
    (f"{QUERY} none.npy", FAILED, "give at least one item"),
    (f"{QUERY} nan.npy", FAILED, r"holds NaN at index \[1, 5\]: fill or drop it"),
    ("query --app digits --json-input '[[1,2'", FAILED, "the inputs are not valid JSON"),
    ("query --app digits --json-input '[[1],[1,2]]'", FAILED, "ragged list: all items need the same shape"),
    # names and needs
    ("query --app digts --input ok.npy", FAILED, "no app 'digts': see `infaas apps`.*; did you mean digits"),
    ("query --app 'my digits' --input ok.npy", FAILED, "names have 1 to 64 letters, digits, - or _"),
    (f"{QUERY} ok.npy --model mpl-s", FAILED, "has no model 'mpl-s': see `infaas variants`; did you mean mlp-s"),
    ("variants --app digts", FAILED, "no app 'digts': see `infaas apps`; did you mean digits"),
    (f"{QUERY} ok.npy --accuracy 97", USAGE, "--accuracy. must be at least 0 and at most 1, not 97"),
    (f"{QUERY} ok.npy --accuracy 0.9999", FAILED, r"reaches accuracy 0.9999: the best has 0\.\d+ \(.*; ask for less"),
    (f"{QUERY} ok.npy --latency-ms 0.0001", FAILED, r"answers within 0.0001 ms: the fastest takes .* ms \("),
    (f"{QUERY} ok.npy --latency-ms -5", USAGE, "--latency-ms. must be milliseconds, above 0, not -5"),
    (f"{QUERY} ok.npy --cost 1e-12", FAILED, r"costs at most US\$ 1e-12 per 1,000 queries: the cheapest costs US\$"),
    (f"{QUERY} ok.npy --priority 12", USAGE, "--priority. must be at least 1 and at most 9, not 12"),
    ("bench --app digts --seconds 1", FAILED, "no app 'digts'; `infaas apps` lists them"),
    # registrations
    ("register missing.onnx --app a --model m --validation validation.npz", FAILED, "missing.onnx does not exist"),
    ("register model.pkl --app a --model m --validation validation.npz", FAILED, "is a pickle, .* infaas.register"),
    ("register model.h5 --app a --model m --validation validation.npz", FAILED, "convert"),
    ("register empty.onnx --app a --model m --validation validation.npz", FAILED, "empty.onnx is empty"),
    ("register fake.onnx --app a --model m --validation validation.npz", FAILED, "not an ONNX model: .*; export"),
    ("register spark --app a --model m", FAILED, r"of the flavours in its MLmodel \(spark\) none is known: onnx, "),
    ("register plain --app a --model m", FAILED, "plain is a folder without MLmodel: give one that MLflow has written"),
    (f"{REGISTER} missing.npz", FAILED, "the validation set missing.npz does not exist"),
    (f"{REGISTER} fake.npz", FAILED, "fake.npz is no .npz file; make one with numpy.savez"),
    (f"{REGISTER} unlabelled.npz", FAILED, "unlabelled.npz holds no 'y', only x"),
    (f"{REGISTER} labels-only.npz", FAILED, "labels-only.npz holds no 'x', only y"),
    (f"{REGISTER} short.npz", FAILED, "200 .*100 labels"),
    (f"{REGISTER} other-shape.npz", FAILED, r"\[1, 100\]: the model takes \[n, 784\]"),
    (f"{REGISTER} other-classes.npz", FAILED, "outside the model's 10 classes .*: number the classes from 0"),
    (f"{REGISTER} validation.npz --metric acc", USAGE, "metric: 'acc' is none of top1, top5, mae,"),
    (f"{REGISTER} validation.npz --labels missing.txt", USAGE, "--labels missing.txt: cannot be read"),
    (f"{REGISTER} validation.npz --slo-target 99", USAGE, "--slo-target. must be above 0 and below 1, not 99"),
    ("cancel r-none", FAILED, "no job and no registration r-none: `infaas jobs` and `infaas registrations` list them"),
    ("registrations r-none", FAILED, "no app and no registration 'r-none': `infaas registrations --wide` lists them"),
    ("apps digts", FAILED, "no app 'digts': see `infaas apps`; did you mean digits"),
    ("models --model mpl-s", FAILED, "no model 'mpl-s': `infaas models` lists them; did you mean mlp-s"),
    ("jobs --app digts", FAILED, "no app 'digts': see `infaas apps`; did you mean digits"),
    # jobs, administration, history
    ("jobs j-none", FAILED, "there is none with the id j-none: see `infaas jobs`"),
    ("submit --app digits --input ok.npy --output out.csv", FAILED, "output: out.csv must end in one of .npy, .jsonl"),
    ("admin delete-app --app none", FAILED, "there is no app none: see `infaas apps`"),
    ("admin set-target --app digits --slo-target 99", FAILED, "must be above 0 and below 1, not 99"),
    ('sql "SELEC 1"', FAILED, 'syntax error at or near "SELEC"; docs/sql.md'),
    ('sql "SELECT * FROM querys"', FAILED, 'relation "querys" does not exist; .* lists what there is'),
    ('sql "DELETE FROM infaas.query_outcomes"', FAILED, "only reads"),
    # systems and settings
    ("up --data-dir {data}", FAILED, "a system runs in .* already: `kill [0-9]+` stops it, or choose another --data-dir"),
    ("up --data-dir file", FAILED, "file cannot be made: it is a file; choose another --data-dir"),
    ("up --data-dir new --port-base {port}", FAILED, "port {port} for nats is busy: stop what uses it or choose another"),
    ("up --data-dir new --config missing.toml", USAGE, "missing.toml: cannot be read: No such file"),
    ("up --data-dir new --config bad.toml", USAGE, "bad.toml: is not valid TOML: .*line 1"),
    ("up --data-dir new --config key.toml", USAGE, "dispatcher.cuont: there is no such key; did you mean count"),
    ("up --data-dir new --config value.toml", USAGE, "dispatcher.count: must be a whole number, not 'three'"),
    ("up --data-dir new --config selects.toml", USAGE, "dispatcher.policy 'collections:Counter' lacks the method select: docs/"),
    ("up --data-dir new --config scales.toml", USAGE, "autoscaler.policy 'collections:Counter' lacks the method scale: docs/"),
    ("up --data-dir new --workers 3 --max-workers 2", USAGE, "--max-workers 2 is less than --workers 3"),
    ("apps --data-dir nowhere", FAILED, "no system runs in nowhere: start one with `infaas up --data-dir nowhere`"),
    ("logs --data-dir nowhere", FAILED, "there are no logs in .*: start a system with `infaas up`"),
    ("plan bad.toml", USAGE, "bad.toml: is not valid TOML"),
    ("simulate missing.toml", USAGE, "missing.toml: cannot be read: No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("done", "code", "told"), MISTAKES, ids=[done for done, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_one_sentence_and_its_remedy(
    done: str, code: int, told: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.files)
    monkeypatch.setenv("INFAAS_DATA_DIR", str(place.system.directory))
    port = place.system.nats.rpartition(":")[2]
    arguments = shlex.split(done.replace("{data}", str(place.system.directory)).replace("{port}", port))
    assert main(arguments) == code
    said = capfd.readouterr()
    assert said.out == ""
    *before, last = said.err.splitlines()
    assert last.startswith("infaas: ")
    assert re.search(told.replace("{port}", port), last), last
    assert "Traceback" not in said.err
    assert not before or done.startswith("register")  # what was understood, and the progress


def test_a_wrong_password_and_a_wrong_port_are_told_apart(place: Place) -> None:
    server = place.system.nats.rpartition("@")[2]
    wrong = infaas("apps", INFAAS_NATS_URL=f"nats://infaas:wrong@{server}")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (FAILED, 1)
    assert "refuses the user or password in its URL; use the URL that `infaas up` printed" in wrong.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = infaas("apps", INFAAS_NATS_URL=f"nats://127.0.0.1:{free.getsockname()[1]}")
    assert (nobody.returncode, nobody.stderr.count("\n")) == (FAILED, 1)
    assert "start a system with `infaas up`, or name a running one" in nobody.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["apps", "apps --json", "settings --toml"])
def test_a_full_disk_is_named(command: str, place: Place) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            (sys.executable, "-m", "infaas.cli", *command.split()),
            check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
            env=environ(INFAAS_DATA_DIR=str(place.system.directory)),
        )  # fmt: skip
    assert done.returncode == FAILED
    assert done.stderr == "infaas: No space left on device; the disk is full: free some space\n"


def test_in_python_the_same_mistakes_raise_the_same_sentences(place: Place) -> None:
    with pytest.raises(library.NotConnected, match="start one with `infaas up"):
        library.connect_blocking(data_dir=place.files / "nowhere")
    with library.connect_blocking(data_dir=place.system.directory) as system:
        for ask in (lambda: system.query("digts", place.system.x[:1]), lambda: system.variants(app="digts")):
            with pytest.raises(library.Refused, match=r"no app 'digts': see apps\(\).*; did you mean digits"):
                ask()
        with pytest.raises((library.Refused, library.BadInput), match="784"):
            system.query("digits", place.system.x[:1, :5])
        for wrong, kind in ((None, "NoneType"), (len, "builtin_function_or_method"), ({1}, "set")):
            with pytest.raises(library.BadInput, match=f"inputs: a {kind} cannot be sent: give an array, rows"):
                system.query("digits", wrong)
        out = place.files / "twice.npy"
        job = system.submit("digits", place.system.x[:1], out)
        with pytest.raises(library.BadInput, match=f"output: job {job} writes to .*twice.npy: choose another name"):
            system.submit("digits", place.system.x[:1], out)
        system.cancel_job(job)
        system.cancel_job(system.submit("digits", place.system.x[:1], out))
    with pytest.raises(library.BadInput, match="cannot be converted; pass a scikit-learn"):
        library.register(object(), [1], [1], app="a", data_dir=place.system.directory)


def registering(place: Place) -> tuple[str, ...]:
    model = str(digits.models()["cnn-s"])
    validation = str(digits.save_validation(place.files / "whole.npz"))
    about = ("--app", "interrupted", "--model", "interrupted", "--validation", validation)
    return (sys.executable, "-m", "infaas.cli", "register", model, *about, "--data-dir", str(place.system.directory))


def state_of(place: Place, registration: str) -> str:
    listed = infaas("registrations", "--json", "--data-dir", str(place.system.directory))
    return next(one["state"] for one in json.loads(listed.stdout)["items"] if one["registration"] == registration)


def test_ctrl_c_during_register_says_how_to_cancel_where_nobody_can_be_asked(place: Place) -> None:
    with subprocess.Popen(registering(place), stderr=subprocess.PIPE, text=True, env=environ()) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "inspecting" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(120) == INTERRUPTED
    found = re.search(r"`infaas cancel (r-[0-9a-f]+)` cancels it", rest)
    assert found, rest
    cancelled = infaas("cancel", found[1], "--data-dir", str(place.system.directory))
    # Where it has ended meanwhile, that is told.
    assert cancelled.stdout == f"cancelled registration {found[1]}\n" or "has ended already" in cancelled.stderr
    assert "Traceback" not in rest


def test_ctrl_c_during_register_asks_on_a_terminal(place: Place) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        registering(place), stdin=theirs, stderr=theirs, env=environ(), start_new_session=True
    ) as process:
        os.close(theirs)
        said = b""

        def until(word: bytes) -> None:
            nonlocal said
            while word not in said:
                said += os.read(ours, 4096)

        try:
            until(b"inspecting")
            process.send_signal(signal.SIGINT)
            until(b"c and Enter to cancel it: ")
            os.write(ours, b"c\n")
            until(b"cancelled registration r-")
            until(b"\n")
            assert process.wait(120) == INTERRUPTED
        finally:
            process.kill()
            os.close(ours)
    registration = re.search(rb"cancelled registration (r-[0-9a-f]+)", said)
    assert state_of(place, registration[1].decode()) in ("cancelled", "inspecting", "building", "profiling")
