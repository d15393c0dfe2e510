"""`infaas plan`: the paper's example, what is refused and how, and what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from infaas.cli import main
from tests.support.servers.processes import ROOT, infaas

EXAMPLE = ROOT / "examples" / "plan.toml"
FEW, TIGHT = ("qps = 1000", "qps = 10"), ("latency_ms = 300", "latency_ms = 50")


@pytest.fixture
def changed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The example with texts replaced, as a file."""

    def write(*changes: tuple[str, str]) -> str:
        text = EXAMPLE.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path_factory.mktemp("plan") / "plan.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("changes", "instances", "cost"),
    [
        ([FEW], {"A": 2, "B": 0, "C": 0}, 2.0),
        ([FEW, TIGHT], {"A": 0, "B": 1, "C": 0}, 3.0),
        ([], {"A": 0, "B": 2, "C": 1}, 22.0),
    ],
)
def test_tables_2_and_3_of_the_paper(
    changes: list[tuple[str, str]],
    instances: dict[str, int],
    cost: float,
    changed: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", changed(*changes), "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert said.err == ""
    assert (document["status"], document["solver"]) == ("optimal", "ilp")
    assert document["instances"] == instances
    assert document["cost_per_s"] == cost
    assert document["actions"] == [{"variant": v, "delta": n, "kind": "load"} for v, n in instances.items() if n]
    assert document["solve_ms"] > 0
    assert "reason" not in document


def test_the_example_as_a_process_for_people() -> None:
    done = infaas("plan", str(EXAMPLE))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["variant", "hardware"]
    assert lines[2].split() == ["B", "inferentia", "0", "2", "load", "+2", "200", "6"]
    assert lines[-1].startswith("optimal, by ilp in ")
    assert lines[-1].endswith(" ms: 22 US$/s")


def test_greedy_by_name(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", changed(), "--policy", "greedy", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["solver"], document["cost_per_s"]) == (
        "feasible",
        "greedy",
        30.0,
    )  # of one variant


SCARCE = ("slack = 1.0 ", "resources = { inferentia_cores = 1.5, cpu_cores = 100, gpus = 1 }\nslack = 1.0 ")


def test_a_plan_that_takes_searching_prints_json_and_nothing_else(changed: Any) -> None:
    """HiGHS prints by itself at times; stdout is for the document."""
    done = infaas("plan", changed(SCARCE), "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["status"], document["solver"]) == ("optimal", "ilp")
    assert document["instances"] == {"A": 20, "B": 1, "C": 1}
    assert document["cost_per_s"] == 39.0


@pytest.mark.parametrize("policy", ["ilp", "greedy"])
def test_infeasible_is_printed_and_exits_1(policy: str, changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(("latency_ms = 300", "latency_ms = 10"))
    assert main(["plan", path, "--json", "--policy", policy]) == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["status"] == "infeasible"
    assert document["instances"] == {"A": 0, "B": 0, "C": 0}
    assert document["actions"] == []
    assert document["reason"] == "app classify: no variant answers within 10 ms: C takes 15 ms"
    assert document["unmet"][0]["missing_qps"] == pytest.approx(1000)
    assert said.err == f"infaas: infeasible: {document['reason']}\n"
    assert main(["plan", path, "--policy", policy]) == 1
    assert "infeasible, by" in capsys.readouterr().out


def test_defaults_of_the_contract(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Slack 1.05: 1,000 queries/s need 1,050; lambda 0.1; running 0; accuracies optional; nothing scarce."""
    path = changed(("slack = 1.0 ", "# "), ("lambda = 0.0 ", "# "))
    assert main(["plan", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["instances"] == {"A": 0, "B": 3, "C": 1}
    assert document["objective"] == pytest.approx(3 * 3 * 1.4 + 16 * 1.8)


def test_more_than_the_contract_asks(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Several apps a variant, several classes an app, a budget, a cost ceiling."""
    path = changed(
        ("slack = 1.0 ", 'objective = "additive"\nbudget_per_hour = 3600\nslack = 1.0 '),
        (
            'app = "classify"\nmodel = "resnet50"\nname = "C"',
            'app = ["classify", "other"]\nmodel = "resnet50"\nname = "C"',
        ),
        ("qps = 1000", 'qps = 10\ncost = 25.0\n[[app]]\nname = "other"\nqps = 10\n[[app]]\nname = "classify"\nqps = 0'),
    )
    assert main(["plan", path, "--json"]) == 1
    assert "the budget of 3,600 US$/h" in json.loads(capsys.readouterr().out)["reason"]
    Path(path).write_text(Path(path).read_text().replace("= 3600\n", "= 57600\n"))
    assert main(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["instances"] == {"A": 0, "B": 0, "C": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("saturation_qps = 100", "saturation_qps = 0"),
            "variant[1].saturation_qps: must be above 0 and at most 1e+15, not 0",
        ),
        (
            ("cost_per_s = 3.0", "cost_per_s = -3"),
            "variant[1].cost_per_s: must be at least 0 and at most 1e+15, not -3",
        ),
        (("cost_per_s = 3.0", 'cost_per_s = "3"'), "variant[1].cost_per_s: must be a number, not '3'"),
        (("cost_per_s = 3.0", ""), "variant[1].cost_per_s: is missing"),
        (("load_s = 4.0", "running = 1.5"), "variant[1].running: must be a whole number, not 1.5"),
        (("load_s = 4.0", "load_s = nan"), "variant[1].load_s: must be at least 0 and at most 1e+15, not nan"),
        (("load_s = 4.0", "accuracy = 75"), "variant[1].accuracy: must be at least 0 and at most 1, not 75"),
        (("{ gpus = 1 }", "{ gpus = -1 }"), "variant[2].uses.gpus: must be at least 0 and at most 1e+15, not -1"),
        (('name = "B"', 'name = "A"'), "variant[1].name: 'A' is there twice"),
        (("qps = 1000", "qps = inf"), "app[0].qps: must be at least 0 and at most 1e+15, not inf"),
        (("qps = 1000", "qsp = 1000"), "app[0].qsp: there is no such key; did you mean qps?"),
        (("latency_ms = 300", "latency_ms = -1"), "app[0].latency_ms: must be above 0 and at most 1e+15, not -1"),
        (("[[app]]", "[app]"), "app: must be written [[app]], one block for each"),
        (
            ("[[app]]", "[[application]]"),
            "application: there is no such key; there are app, budget_per_hour, lambda, objective, resources, slack, variant",
        ),
        (("slack = 1.0 ", "slack = -1 "), "slack: must be above 0 and at most 1e+15, not -1"),
        (("slack = 1.0 ", "slak = 1.0 "), "slak: there is no such key; did you mean slack?"),
        (
            ("slack = 1.0 ", "weight = 1.0 "),
            "weight: there is no such key; there are app, budget_per_hour, lambda, objective, resources, slack, variant",
        ),
        (("load_s = 4.0", "latency = 4.0"), "variant[1].latency: there is no such key; did you mean latency_ms?"),
        (
            ("cost_per_s = 3.0", "cost_per_s = 1e308"),
            "variant[1].cost_per_s: must be at least 0 and at most 1e+15, not 1e+308",
        ),
        (
            ("cost_per_s = 3.0", "cost_per_s = 1e999"),
            "variant[1].cost_per_s: must be at least 0 and at most 1e+15, not inf",
        ),
        (
            ("load_s = 4.0", "running = 2000000"),
            "variant[1].running: must be at least 0 and at most 1000000, not 2000000",
        ),
        (
            (
                "qps = 1000",
                "qps = 10000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
            ),
            "app[0].qps: must be at least 0 and at most 1e+15, not 1e+300",
        ),
        (("qps = 1000", "qps = true"), "app[0].qps: must be a number, not True"),
        (("qps = 1000", "qps = 1979-05-27"), "app[0].qps: must be a number, not datetime.date(1979, 5, 27)"),
        (("{ gpus = 1 }", "{ gpus = 'one' }"), "variant[2].uses.gpus: must be a number, not 'one'"),
        (("{ gpus = 1 }", "[1]"), "variant[2].uses: must be a table, not [1]"),
        (("slack = 1.0 ", "resources = { cpus = 1, gpus = 'x' } "), "resources.gpus: must be a number, not 'x'"),
        (('name = "B"', 'name = ""'), "variant[1].name: must be some printable text, not ''"),
        (('name = "B"', 'name = "B\\u001b[31m"'), "variant[1].name: must be some printable text, not 'B\\x1b[31m'"),
        (('name = "B"', "name = 7"), "variant[1].name: must be some printable text, not 7"),
        (("lambda = 0.0 ", "lambda = -0.5 "), "lambda: must be at least 0 and at most 1e+15, not -0.5"),
        (("slack = 1.0 ", "budget_per_hour = -7 "), "budget_per_hour: must be at least 0 and at most 1e+15, not -7"),
        (
            ("slack = 1.0 ", "resources = { gpus = -2 } "),
            "resources.gpus: must be at least 0 and at most 1e+15, not -2",
        ),
        (
            ("slack = 1.0 ", "objective = 'least' "),
            "objective: there is no objective 'least'; there are additive, multiplicative",
        ),
        (
            ("[[app]]", '[[app]]\nname = "classify"\nqps = 3\nlatency_ms = 300\n[[app]]'),
            "app[1].name: 'classify' is there twice with the same requirements",
        ),
        (("qps = 1000", "qps = 1e14"), "app[0].qps: needs more than 1000000 instances of any variant"),
    ],
)
def test_bad_files_are_refused_with_file_key_and_reason(
    change: tuple[str, str], said: str, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(change)
    assert main(["plan", path, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"infaas: {path}: {said}\n"


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("[]", "must name at least one app"),
        ('["classify", "classify"]', "names an app twice"),
        ("[1]", "must be some printable text, not 1"),
    ],
)
def test_apps_of_a_variant(app: str, said: str, changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    block = ('app = "classify"\nmodel = "resnet50"\nname = "C"', f'app = {app}\nmodel = "resnet50"\nname = "C"')
    assert main(["plan", changed(block)]) == 2
    err = capsys.readouterr().err
    assert "variant[2].app" in err
    assert said in err


def test_a_byte_order_mark_is_no_harm(changed: Any) -> None:
    path = Path(changed())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert main(["plan", str(path), "--json"]) == 0


def test_files_that_are_none(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path_factory.mktemp("plan")
    for name, body, reason in (
        ("absent.toml", None, "No such file or directory"),
        ("broken.toml", b"slack = \n", "not valid TOML"),
        ("binary.toml", b"\xff\xfe\x00", "not valid TOML: byte 0 is not UTF-8 text"),
        ("zeros.toml", b"\x00" * 100, "not valid TOML"),
        ("large.toml", b"#" * (8 * 2**20 + 1), "larger than 8 MiB"),
        ("deep.toml", b"a = " + b"[" * 5000, "nested too deeply"),
        ("json.toml", b'{"variant": []}', "not valid TOML"),
        ("empty.toml", b"", "variant: is missing"),
        ("idle.toml", b"variant = []\napp = []\n", "variant: there must be at least one [[variant]]"),
    ):
        if body is not None:
            (place / name).write_bytes(body)
        assert main(["plan", str(place / name)]) == 2
        err = capsys.readouterr().err
        assert name in err
        assert reason in err
        assert err.count("\n") == 1
    assert main(["plan", "/dev/zero"]) == 2
    assert "larger than" in capsys.readouterr().err
    assert main(["plan", str(place)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert main(["plan", str(EXAMPLE), "--policy", "gurobi"]) == 2
    assert main(["plan", str(EXAMPLE), "--time-limit", "0"]) == 2


def test_wide_shows_what_the_terminal_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for wide in ([], ["--wide"]):
        assert main(["plan", str(EXAMPLE), *wide]) == 0
        assert ("instances now" in capsys.readouterr().out) is bool(wide)


def test_the_exact_solver_stops_at_its_time_limit(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is then the greedy one; greedy has no limit to take."""
    assert main(["plan", changed(SCARCE), "--json", "--time-limit", "0.000001"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["solver"]) == ("feasible", "greedy")
    assert "exact solver" in found["reason"]
    assert main(["plan", str(EXAMPLE), "--policy", "greedy", "--time-limit", "1"]) == 2
    assert "--time-limit: greedy" in capsys.readouterr().err
