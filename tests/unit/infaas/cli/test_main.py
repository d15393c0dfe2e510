import json
import sys
from pathlib import Path

import numpy as np
import pytest

from infaas.cli import COMMANDS, build, main
from infaas.cli.admin import VERBS
from infaas.cli.output import Failure, fail, print_json, usage
from tests.support.clients.commands import ran
from tests.support.servers.processes import infaas


def test_help_names_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    done = infaas("--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert [name for name in ("up", "run", "doctor") if name not in done.stdout] == []
    assert "infaas.cli" in done.stderr
    for heavy in ("numpy", "psycopg", "nats", "onnxruntime", "infaas.cli.up"):
        assert f" {heavy}\n" not in done.stderr
    told = ran(capsys, ["admin", "--help"]).out
    assert [verb for verb in VERBS if verb not in told] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_in_full_what_it_does(name: str) -> None:
    if COMMANDS[name].function.startswith("infaas.cli.admin:"):
        return  # a group: its commands say it
    short, full = build()[name].help, build(name)[name].help
    assert short.endswith((".", "?"))
    assert full.partition("\n")[0].strip().endswith((".", "?"))
    assert full != short


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuchcommand"],
        ["up", "--nosuchoption"],
        ["up", "--workers", "many"],
        ["up", "--workers", "1.5"],
        ["up", "--workers", "0"],
        ["demo", "--family", "birds"],
        ["demo", "--plot", "picture.svg"],
        ["demo", "--ensemble", "--family", "photos"],
        ["demo", "--ensemble", "--plot", "picture.txt"],
        ["demo", "--ensemble", "--pipeline"],
        ["demo", "--pipeline", "--family", "photos"],
        ["up", "--port-base", "99999"],
        ["up", "--simulate", "tpu=1"],
        ["up", "--simulate", "gpu"],
        ["up", "--simulate", "gpu=many"],
        ["up", "--simulate", "gpu=-1"],
        ["run"],
        ["run", "nosuchservice"],
    ],
)
def test_bad_usage_exits_2_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = ran(capsys, arguments, 2)
    assert said.out == ""
    assert said.err.startswith("infaas: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("regster", "there is no command 'regster'; did you mean 'register'?"),
        ("nosuch", "there is no command 'nosuch'; `infaas --help` lists all"),
        ("apps --jsn", "apps has no option --jsn; did you mean --json?"),
        ("down", "there is no command 'down': Ctrl-C where `infaas up` runs, or SIGTERM, stops everything"),
        ("logs --tail 5", "logs has no option --tail; `infaas logs --help` lists its options"),
        ("apps --zzz", "apps has no option --zzz; `infaas apps --help` lists its options"),
        ("register m.onnx", "register needs --app: write --app VALUE, `infaas register --help` lists what it takes"),
        ("query --app", "query: --app needs a value: write it after --app, `infaas query --help` lists what it takes"),
        (
            "query --app a --input",
            "query: --input needs a value: write it after --input, `infaas query --help` lists what it takes",
        ),
        (
            "query digits more",
            "query does not take 'more': write each value after its option, `infaas query --help` lists them",
        ),
        ("job lst", "job has no verb 'lst': use submit, list, show, cancel; did you mean 'list'?"),
        ("pipeline lst", "there is no verb 'lst': use add, list, plan, deploy, remove, trace; did you mean 'list'?"),
    ],
)
def test_a_usage_error_names_what_was_meant(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, arguments.split(), 2).err == f"infaas: {said}\n"


@pytest.mark.parametrize(
    "arguments", ["admin set-version a --model m --version 1", "query --app a --json-input [1] --version 1"]
)
@pytest.mark.parametrize("option", ["--version", "--model-version"])
def test_a_version_is_the_models(
    arguments: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.replace("--version", option).split()
    assert "no system runs in" in ran(capsys, [*words, "--data-dir", str(tmp_path)], 1).err


OF_A_SYSTEM = {  # each command that asks one, with what else it needs
    "register": "m.onnx --app a --validation v.npz", "container": "own:A --app a --validation v.npz",
    "query": "--app a --json-input [1]", "explain": "--app a", "submit": "--app a --input nats://b/x.npy --output nats://b/y.npy",
    "jobs": "", "cancel": "x1", "replay": "", "shadow": "infaas", "apps": "", "models": "", "variants": "", "registrations": "",
    "selection": "--app a", "workers": "", "pipeline": "list", "apply": "s.toml", "export": "", "admin": "delete-app a", "status": "", "open": "", "logs": "",
    "sql": "SELECT", "bench": "--app a --input x.npy --closed 1", "run": "dispatcher", "doctor": "",
}  # fmt: skip


@pytest.mark.parametrize("command", OF_A_SYSTEM)
def test_each_command_asks_the_system_in_its_data_dir(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("v.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4))
    np.save("x.npy", np.zeros((4, 2), np.float32))
    Path("m.onnx").write_bytes(b"model")
    Path("s.toml").write_text("")
    Path("own.py").write_text("class A:\n    def predict_batch(self, inputs):\n        return {'y': inputs['x']}\n")
    told = ran(capsys, [command, *OF_A_SYSTEM[command].split(), "--data-dir", str(tmp_path / "elsewhere")], 1)
    assert "elsewhere" in told.err + told.out


def test_a_service_says_what_is_wrong_in_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "own.toml"
    config.write_text('log_level = "loud"\n')
    for service in ("dispatcher", "engine-proxy", "dashboard", "worker"):
        said = ran(capsys, ["run", service, "--config", str(config)], 2).err
        assert "log_level" in said and str(config) in said


def test_a_demo_shows_the_family_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_family.py").write_text(
        "from infaas.errors import BadInput\nasync def make(progress):\n    raise BadInput('the models of my family')\n"
    )
    assert "the models of my family" in ran(capsys, ["demo", "--family", "own_family:make"], 1).err


def test_versions_dashes_and_unknown_services(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ran(capsys, ["--version"]).out
    for command in COMMANDS:
        assert main([command, "--version"]) == 2, command
        assert capsys.readouterr().out == "" != printed
    # Only the second option is wrong: the dash before it was taken as the value of --input.
    for command in ("query", "bench"):
        assert main([command, "--app", "a", "--input", "-", "--zzz"]) == 2
        assert capsys.readouterr().err.startswith(f"infaas: {command} has no option --zzz")
    main(["run", "nosuchservice"])
    said = capsys.readouterr().err
    assert "nosuchservice" in said
    for service in ("dispatcher", "executor", "monitor", "recorder", "registrar"):
        assert service in said


def test_absent_servers_and_bad_settings_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ran(capsys, ["doctor", "--data-dir", str(tmp_path / "none"), "--json"], 1)
    checks = {check["check"]: check for check in json.loads(said.out)["checks"]}
    assert checks["python"]["state"] == "ok"
    assert checks["system"]["state"] == "failed"
    assert checks["system"]["remedy"]
    file = tmp_path / "bad.toml"
    file.write_text("[dispatcher]\ncuont = 3\n")
    said = ran(capsys, ["up", "--config", str(file)], 2)
    assert "cuont" in said.err
    assert said.err.count("\n") == 1
    monkeypatch.setenv("INFAAS_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("INFAAS_SQL_DSN", "postgresql://127.0.0.1:1/x")
    lines = [line.split()[:2] for line in ran(capsys, ["doctor"], 1).out.splitlines()]
    assert ["FAILED", "nats"] in lines
    assert ["FAILED", "sql"] in lines


def test_fail_and_usage_carry_their_codes() -> None:
    with pytest.raises(Failure) as failed:
        fail("no")
    assert failed.value.code == 1
    with pytest.raises(Failure) as misused:
        usage("no")
    assert misused.value.code == 2


def test_json_of_numpy_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    print_json({"a": np.float32(0.5), "b": np.arange(2), "c": b"\x01", "d": sys})
    document = json.loads(capsys.readouterr().out)
    assert document["a"] == 0.5
    assert document["b"] == [0, 1]
    assert document["c"] == "01"


@pytest.mark.parametrize("words", ["help", "--help", "-h"])
def test_words_that_people_try_lead_somewhere(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = ran(capsys, [words]).out
    assert [name for name in COMMANDS if f" {name} " not in told] == []
    places = [told.index(f"│ {name} ") for name in ("query", "app", "sql", "apps")]
    assert places == sorted(places)
    assert ran(capsys, ["-v"]).out == ran(capsys, ["--version"]).out
    assert "Usage: infaas job submit" in ran(capsys, ["help", "job", "submit"]).out


@pytest.mark.parametrize(
    "words",
    [
        "ps", "app list", "app list a", "app query a --json-input [1]", "app explain a", "app selection a", "app set a --latency-ms 5",
        "model list", "model variants a", "model registrations", "model link m --app a", "model release-variant v", "worker list",
        "job list", "job cancel j", "job submit a --input nats://b/x.npy --output nats://b/y.npy", "query a --json-input [1]",
        "bench a --closed 1", "explain a", "selection a", "submit a --input nats://b/x.npy --output nats://b/y.npy", "variants a",
    ],
)  # fmt: skip
def test_verbs_of_nouns_and_apps_without_their_option_ask_the_system(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no system runs in" in ran(capsys, [*words.split(), "--data-dir", str(tmp_path)], 1).err
