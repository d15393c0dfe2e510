import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from infaas.cli import COMMANDS, build, main
from infaas.cli.admin import VERBS
from infaas.cli.output import Failure, fail, print_json, usage
from tests.support.clients.commands import ran, refused
from tests.support.servers.processes import ROOT, infaas


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


# What is written, and what the one line says (a pattern). small.toml is an example; the second line of bad.txt is no number.
BAD_USAGE = [
    # what there is
    ("nosuchcommand", "there is no command 'nosuchcommand'; `infaas --help` lists all$"),
    ("regster", "there is no command 'regster'; did you mean register.$"),
    ("down", "there is no command 'down': Ctrl-C where `infaas up` runs, or SIGTERM, stops everything$"),
    ("logs --tail 5", "logs has no option --tail; `infaas logs --help` lists its options$"),
    ("apps --jsn", "apps has no option --jsn; did you mean --json.$"),
    ("apps --zzz", "apps has no option --zzz; `infaas apps --help` lists its options$"),
    ("register m.onnx", "register needs --app: write --app VALUE, `infaas register --help` lists what it takes$"),
    ("register m.onnx --app a --validation v.npz --labels no,yes,no", "--labels no,yes,no: 'no' stands there twice"),
    ("register m.onnx --app a --validation v.npz --default-output {", "{ is no JSON .*: close what it opens"),
    ("query --app", "query: --app needs a value: write it after --app, `infaas query --help` lists what it takes$"),
    ("query --app a --input", "query: --input needs a value: write it after --input, `infaas query --help` lists what it takes$"),
    ("query digits more", "query does not take 'more': write each value after its option, `infaas query --help` lists them$"),
    ("job lst", "job has no verb 'lst': use submit, list, show, cancel; did you mean list.$"),
    ("pipeline lst", "there is no verb 'lst': use add, list, plan, deploy, remove, trace; did you mean list.$"),
    ("settings nonsense", "there is no section 'nonsense'"),
    ("settings --toml --json", "--json"),
    # systems and services
    ("up --nosuchoption", "up has no option --nosuchoption"),
    ("up --workers many", "--workers: must be a whole number, not 'many'"),
    ("up --workers 1.5", "--workers: must be a whole number, not '1.5'"),
    ("up --workers 0", "--workers. Must be >= 1"),
    ("up --port-base 99999", "--port-base. Must be <= 65000"),
    ("up --simulate tpu=1", r"can be simulated \(gpu, inferentia\), not 'tpu'"),
    ("up --simulate gpu", "worker.simulate must be written kind=number,kind=number, not 'gpu'"),
    ("up --simulate gpu=many", "worker.simulate.gpu.: must be a whole number, not 'many'"),
    ("up --simulate gpu=-1", "worker.simulate.gpu.: must be at least 0 and at most 16, not -1"),
    ("run", "name at least one service: dashboard, dispatcher"),
    ("run nosuchservice", "nosuchservice"),
    ("demo --family birds", "birds"),
    ("demo --plot picture.svg", "--plot"),
    ("demo --ensemble --family photos", "--family"),
    ("demo --ensemble --plot picture.txt", "--plot"),
    ("demo --ensemble --pipeline", "--pipeline"),
    ("demo --pipeline --family photos", "--family"),
    # operators' verbs
    ("admin explode", "explode.*set-version"),
    ("admin set-version --app a", "set-version needs.*--model.*--version"),
    ("admin add-app --app a --model m", "add-app has no option --model"),
    ("admin set-replicas --app a --count 1.5", "--count.*whole number"),
    ("admin set-target --app a", "set-target needs at least one of --slo-target, --accuracy-mean, --worth"),
    ("admin set-target --app a --slo-target most", "--slo-target.*most"),
    ("admin set-selection --policy exp4", "set-selection needs.*--app"),
    ("admin set-selection digits --policy exp4 --members", "--members needs a value"),
    ("admin set-selection digits --eta much", "--eta.*much"),
    ("admin set-target digits --slo-target 0.9 --contextual", "set-target has no option --contextual"),
    ("admin set-batching --policy aimd", "set-batching needs.*--app.*--model.*--variant"),
    ("admin set-batching --app a --model m", "exactly one"),
    ("admin set-batching --app a --batch 1.5", "--batch.*whole number"),
    ("admin add-app a --no-latency-ms", "add-app has no option --no-latency-ms"),
    ("admin set-app a --slo-target 0.9 --no-slo-target", "--no-slo-target.*one of both|one of both.*--no-slo-target"),
    # pipelines
    ("pipeline explode", "there is no verb 'explode': use add, list, plan, deploy, remove, trace"),
    ("pipeline add", "add needs a pipeline's file"),
    ("pipeline list social", "list takes no argument"),
    ("pipeline remove", "remove needs the name of a pipeline"),
    ("pipeline remove social --undeploy", "remove takes no --undeploy"),
    ("pipeline add x.toml --policy inferline", "add takes no --policy"),
    ("pipeline plan x.toml --policy magic", "magic"),
    ("pipeline plan none/x.toml", "none/x.toml: cannot be read: No such file or directory"),
    ("pipeline add none/x.toml", "none/x.toml: cannot be read: No such file or directory"),
    ("pipeline deploy none/x.json", "cannot read none/x.json: No such file or directory"),
    ("pipeline trace drivers:cascade", "trace needs --samples"),
    ("pipeline trace drivers --samples x.npz", "'drivers' names no function: write MODULE:FUNCTION"),
    ("pipeline trace no.such:driver --samples x.npz", "cannot import no.such:driver: ModuleNotFoundError"),
    ("pipeline trace json:nothing --samples x.npz", "cannot import json:nothing: AttributeError"),
    ("pipeline trace json:dumps --samples x.npz", "json:dumps is no driver: it must be an `async def` function"),
    # simulations
    ("simulate", "name a scenario file: infaas simulate SCENARIO.toml"),
    ("simulate nothing.toml", "nothing.toml: cannot be read: No such file or directory"),
    ("simulate small.toml --policy nosuch", "there is no policy 'nosuch'"),
    ("simulate small.toml --policy", "--policy needs a value"),
    ("simulate small.toml --seed -1", "--seed"),
    ("simulate small.toml --seed x", "--seed: must be a whole number, not 'x'"),
    ("simulate small.toml --seed 1.5", "--seed: must be a whole number, not '1.5'"),
    ("simulate small.toml --out nowhere/kept.json", "--out nowhere/kept.json: there is no directory nowhere"),
    ("simulate small.toml --out .", "--out .: cannot be written"),
    ("simulate small.toml --plot run.bmp", "--plot run.bmp: the name must end in .png, .svg or .pdf"),
    # shadows
    ("shadow", "name a policy"),
    ("shadow infass", "did you mean infaas."),
    ("shadow no.such.module:Policy", "cannot be loaded"),
    ("shadow infaas --seconds 0", "Must be > 0"),
    ("shadow infaas --slo-target 1", "--slo-target 1: must be above 0 and below 1"),
    ("shadow infaas --slo-target nan", "must be above 0 and below 1"),
    ("shadow infaas --set hold_s=3", "must be a section and a key"),
    ("shadow infaas --set autoscaler.hold_s=soon", "--set: autoscaler.hold_s: must be a number, not 'soon'"),
    ("shadow infaas --set autoscaler.nonsense=1", "--set: autoscaler.nonsense: there is no such key"),
    ("shadow infaas --set bus.url=nats://x", "no policy reads it"),
    ("shadow infaas --set autoscaler", "write KEY=VALUE"),
    # load
    ("bench --app a --closed 4 --rate 5", "--closed and --rate are different kinds of load"),
    ("bench --app a --closed 4 --trace good.txt", "--closed and --trace are different kinds of load"),
    ("bench --app a --rate 5 --rate-points 0:1", "--rate-points and --rate are different kinds of load"),
    ("bench --app a --times good.txt --trace good.txt", "--times and --trace are different kinds of load"),
    ("bench --app a --arrivals mmpp --rates 1,2", "--dwell: is missing"),
    ("bench --app a --arrivals gamma --rates 1,2 --dwell 1,2", "another kind of load than --rates"),
    ("bench --app a --arrivals mmpp --rates 1,2 --dwell 1", "--dwell: must have one entry for each of rates .2., not 1"),
    ("bench --app a --arrivals mmpp --rates 1,2 --dwell 1,0", "--dwell: must be above 0"),
    ("bench --app a --arrivals mmpp --rates 1,-2 --dwell 1,1", "--rates: '1,-2': write numbers of at least 0"),
    ("bench --app a --arrivals mmpp --rates 0,0 --dwell 1,1", "--rates: no query would be sent"),
    ("bench --app a --arrivals mmpp --rates 1,1e6 --dwell 1e9,1", "--rates: the peak is above 200,000 queries/s"),
    ("bench --app a --arrivals gamma", "--rate: is missing"),
    ("bench --app a --arrivals uniform --trace good.txt", "--arrivals uniform is another kind of load than --trace"),
    ("bench --app a --arrivals gamma --rate 5", "--cv: is missing"),
    ("bench --app a --seed 1.5", "--seed: must be a whole number, not '1.5'"),
    ("bench --app a --seed -1", "for --seed. Must be >= 0"),
    ("bench --app a --closed 2.5", "--closed: must be a whole number, not '2.5'"),
    ("bench --app a --items 1.5", "--items: must be a whole number, not '1.5'"),
    ("bench --app a --priority 1.5", "--priority: must be a whole number, not '1.5'"),
    ("bench --app a --latency-ms fast", "--latency-ms must be a number, not 'fast'"),
    ("bench --app a --priority 0", ".0. for --priority. must be at least 1 and at most 9"),
    ("bench --app a --priority 10", ".10. for --priority. must be at least 1 and at most 9"),
    ("bench --app a --cv 2 --rate 5", "--cv: means nothing with arrivals .poisson."),
    ("bench --app a --rate-points 0:4,60", "--rate-points: '60': write two numbers of at least 0, separated by a colon"),
    ("bench --app a --rate-points 0:4,nan:5", "--rate-points: 'nan:5'"),
    ("bench --app a --rate-points 5:4,0:5", "--rate-points: must not be before the point before it"),
    ("bench --app a --rate-points 0:0", "--rate-points: no query would be sent in 11 s"),
    ("bench --app a --range-qps 1:5", "--range-qps: means nothing with arrivals .poisson."),
    ("bench --app a --range-qps 1:5 --rate 3 --trace good.txt", "--range-qps: says another scale than --rate"),
    ("bench --app a --range-qps 5:1 --trace good.txt", "--range-qps: must be .lowest, highest. queries/s"),
    ("bench --app a --range-qps 5 --trace good.txt", "--range-qps: '5': write two numbers"),
    ("bench --app a --seconds-per-line 2", "--seconds-per-line: means nothing with arrivals .poisson."),
    ("bench --app a --trace bad.txt", "--trace: bad.txt, line 2: 'x' is no count of queries"),
    ("bench --app a --times bad.txt", "--times: bad.txt, line 2: 'x' is no time"),
    ("bench --app a --trace nowhere.txt", "--trace: cannot read the trace nowhere.txt: No such file"),
    ("bench --app a --rate 100000 --seconds 3000", "--rate: more than 20,000,000 queries in 3001 s"),
    ("bench --app a --app b --shares 0.5,0.4", "--shares: must add up to 1, not 0.9"),
    ("bench --app a --app b --shares 1", "--shares: must have one entry for each of apps .2., not 1"),
    ("bench --app a --shares zipf:x", "--shares: 'x'"),
    ("bench --app a --shares zipf:1,2", "--shares: 'zipf:1,2': write one exponent"),
    ("bench --app a --app a", "--app: an app is named twice"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), BAD_USAGE)
def test_bad_usage_exits_2_with_one_line_before_anything_runs(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFAAS_DATA_DIR", str(tmp_path))
    places = {"nats": "nats://127.0.0.1:1", "sql": "postgresql://127.0.0.1:1/x", "running": True, "settings": {}}
    texts = {"good.txt": "1\n2\n", "bad.txt": "1\nx\n", "endpoints.json": json.dumps(places)}
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("small.toml").symlink_to(ROOT / "examples" / "scenario.toml")
    assert re.search(said, refused(capsys, arguments.split()))


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
    "query": "--app a --json-input [1]", "feedback": "a l.csv", "explain": "--app a", "submit": "--app a --input nats://b/x.npy --output nats://b/y.npy",
    "jobs": "", "cancel": "x1", "replay": "", "shadow": "infaas", "apps": "", "models": "", "variants": "", "registrations": "",
    "selection": "--app a", "workers": "", "pipeline": "list", "apply": "s.toml", "export": "", "payloads": "delete a", "remeasure": "a", "admin": "delete-app a", "status": "", "open": "", "logs": "",
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
    Path("l.csv").write_text("id,label\n1,1\n")
    Path("own.py").write_text("class A:\n    def predict_batch(self, inputs):\n        return {'y': inputs['x']}\n")
    told = ran(capsys, [command, *OF_A_SYSTEM[command].split(), "--data-dir", str(tmp_path / "elsewhere")], 1)
    assert "elsewhere" in told.err + told.out


def test_a_service_says_what_is_wrong_in_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "own.toml"
    config.write_text('log_level = "loud"\n')
    for service in ("dispatcher", "engine-proxy", "dashboard", "worker"):
        said = refused(capsys, ["run", service, "--config", str(config)])
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
    assert "cuont" in refused(capsys, ["up", "--config", str(file)])
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
