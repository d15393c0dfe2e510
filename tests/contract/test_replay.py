"""`infaas replay`: from a real database's rows to figures beside what happened; files of them; what is refused and how."""

import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import psycopg
import pytest
from msgspec.structs import replace

from bus.memory import MemoryBus
from bus.messages.events import CostEvent, OutcomeEvent, WorkerSample
from bus.subjects import Subjects
from infaas.cli import main
from services.core.placement import container_kind
from services.recorder.actor import DAY_S, CompareDay
from services.recorder.catalog import CatalogWriter
from services.recorder.edge import BEGUN, Counter, RecorderEdge, _begin, best_of
from services.recorder.edge_copies import FileCopies
from services.shell.store import Store, StoreError
from services.simulation.report import MEASURED
from tests.support.clients import commands
from tests.support.data.events import event
from tests.support.data.recorded_history import (
    BEGINS,
    OTHER,
    PRICES,
    bills,
    catalogue,
    minute,
    outcomes,
    record,
    samples,
)
from tests.support.servers.processes import ROOT

HOUR = ("--from", "2025-11-17T08:00Z", "--to", "2025-11-17T09:00Z")
MACHINES = """
[[worker]]
kind = "large"
devices = { cpu = 8 }
price_per_hour = 1.5
boot_s = 5
start = 1
max = 3
[[policy]]
name = "twice"
base = "static"
start = { large = 2 }
[settings.autoscaler]
slack = 1.2
"""

Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]
At = Callable[[str], list[str]]


@pytest.fixture
def at(tmp_path_factory: pytest.TempPathFactory) -> At:
    """Options by which a command finds this database: the directory of a system that has it."""
    directory = tmp_path_factory.mktemp("system")

    def options(dsn: str) -> list[str]:
        places = {"nats": "nats://127.0.0.1:1", "sql": dsn, "running": True}
        (directory / "endpoints.json").write_text(json.dumps(places))
        return ["--data-dir", str(directory)]

    return options


@pytest.fixture
def replay(past: str, at: At, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the recorded minute, or another database; gives its document without what a clock measured."""

    def run(*arguments: object, dsn: str = past) -> dict[str, Any]:
        code = main(["replay", *at(dsn), *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        document: dict[str, Any] = json.loads(printed.out)
        for one in document.get("policies", ()):
            for key in MEASURED:
                del one[key]
        return document

    return run


@pytest.fixture
def refused(empty_dsn: str, at: At, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs it on an empty database, or another one; gives the one line that says why not."""

    def run(*arguments: object, dsn: str = empty_dsn) -> str:
        return commands.refused(capsys, ["replay", *at(dsn), *map(str, arguments)])

    return run


def test_what_happened_and_what_would_have(replay: Run) -> None:
    found = replay(*HOUR)
    recorded = found["recorded"]
    # nothing ran later
    assert (found["from"], found["to"]) == ("2025-11-17T08:00:00+00:00", "2025-11-17T08:01:00+00:00")
    assert (recorded["queries"], recorded["late"], recorded["refused"], recorded["failed"]) == (900, 18, 9, 0)
    assert recorded["refusals"] == {"deadline": 9}
    assert recorded["slo_violation_ratio"] == pytest.approx(27 / 900)
    assert recorded["simulated"] is False
    rows = outcomes()
    exact = sorted(row.latency_ms or 0.0 for row in rows if row.outcome in ("ok", "late"))
    assert recorded["p50_ms"] == pytest.approx(exact[len(exact) // 2], rel=0.02)
    timely = [row.accuracy for row in rows if row.outcome == "ok" and row.accuracy is not None]
    assert recorded["effective_accuracy"] == pytest.approx(sum(timely) / len(timely))
    assert recorded["cost"] == pytest.approx(4 * PRICES["cpu"] / 60)
    assert recorded["mean_utilisation"] == pytest.approx(0.25)
    assert recorded["scale_actions"] == {"load": 1}
    assert recorded["series"]["instances"][OTHER] == [1] * 30
    assert found["machines"] == [{"kind": "cpu", "price_per_hour": pytest.approx(0.192), "start": 1, "max": 1}]
    assert found["cost"]["comparable"]
    assert [one["policy"] for one in found["policies"]] == ["infaas", "static", "replicate"]
    for one in found["policies"]:
        assert one["simulated"] is True
        assert one["queries"] == one["answered"] == 900
        assert {app: of["queries"] for app, of in one["apps"].items()} == {"digits": 600, "faces": 300}
        assert one["variants"][OTHER] == 300  # faces asks for an accuracy that only this one has
        assert one["cost"] == pytest.approx(recorded["cost"])
        assert [(job["app"], job["inputs"], job["done"]) for job in one["jobs"]] == [("digits", 40, 40)]
    assert found["notes"] == []


def test_parts_of_queries_are_not_asked_again(database_dsn: str, reader_dsn: str, replay: Run) -> None:
    minute(database_dsn)
    parts = [
        event(OutcomeEvent, time=BEGINS + 0.05 * i, app="digits", parent=i.to_bytes(16, "big"), stage=member)
        for i in range(900)
        for member in ("mlp", "big")
    ]
    record(database_dsn, parts)
    found = replay(*HOUR, "--policy", "static", dsn=reader_dsn)
    assert found["recorded"]["queries"] == 900
    assert [one["queries"] for one in found["policies"]] == [900]


def test_targets_are_the_recorded_ones_and_policies_may_have_others(replay: Run, tmp_path: Path) -> None:
    past, file = tmp_path / "past.mp", tmp_path / "targets.toml"
    replay(*HOUR, "--export", past)
    file.write_text("""
[[policy]]
name = "infaas"
[[policy]]
name = "more"
base = "infaas"
settings = { autoscaler = { slo_target = 0.999 } }
""")
    for source in (HOUR, ("--file", past)):
        found = replay(*source, "--machines", file)
        runs = {"recorded": found["recorded"], **{one["policy"]: one for one in found["policies"]}}
        assert {
            name: [one["apps"][app]["slo_target"] for app in ("digits", "faces")] for name, one in runs.items()
        } == {
            "recorded": [0.95, 0.995],
            "infaas": [0.95, 0.995],
            "more": [0.999, 0.995],
        }
        digits = found["recorded"]["apps"]["digits"]
        assert digits["attainment"] == pytest.approx(1 - digits["slo_violation_ratio"])


@pytest.mark.slow
def test_each_target_is_replayed(replay: Run) -> None:
    found = replay(*HOUR, "--slo-target", 0.999, "--slo-target", 0.8)["policies"]
    assert [(one["policy"], one["slo_target"]) for one in found] == [("infaas at 0.999", 0.999), ("infaas at 0.8", 0.8)]
    for one in found:
        assert one["queries"] == 900
        in_time = one["answered"] - one["late"]
        assert one["cost_per_1000_in_time"] == pytest.approx(1000 * one["cost"] / in_time)
    both = replay(*HOUR, "--policy", "infaas-ilp", "static", "--slo-target", 0.9, 0.99)["policies"]
    assert [one["policy"] for one in both] == [
        "infaas-ilp at 0.9",
        "infaas-ilp at 0.99",
        "static at 0.9",
        "static at 0.99",
    ]
    assert "slo_target" not in replay(*HOUR, "--policy", "static")["policies"][0]


def test_people_see_what_each_target_costs(past: str, at: At, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *at(past), *HOUR, "--slo-target", "0.999", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" would have ")[0] for line in lines[:2]] == ["infaas at 0.999", "infaas at 0.5"]
    head, recorded, strict, lax = lines[6:10]
    assert head.split("  ")[0] == "policy"
    assert head.endswith("US$/1,000 in time")
    assert recorded.split()[:4] == ["recorded", "-", "3.000", "%"]
    assert strict.startswith("infaas at 0.999 (simulated)")
    assert " yes " in lax
    assert not any(line.startswith("policy") for line in lines[10:])


def test_a_file_is_as_good_as_the_database(replay: Run, tmp_path: Path) -> None:
    plain, small = tmp_path / "past.mp", tmp_path / "past.mp.gz"
    assert replay(*HOUR, "--export", plain)["queries"] == 900
    replay(*HOUR, "--export", small)
    assert gzip.decompress(small.read_bytes()) == plain.read_bytes()
    assert sorted(tmp_path.iterdir()) == [plain, small]
    assert plain.stat().st_mode & 0o077 == 0
    for word in (b"secret", b"a label", b"somebody"):
        assert word not in plain.read_bytes()
    wanted = ("--policy", "infaas", "--worker", "cpu=1:2")
    expected = replay(*HOUR, *wanted)
    assert expected["machines"][0]["max"] == 2
    assert replay("--file", plain, *wanted) == expected
    assert replay("--file", small, *wanted) == expected
    one_app = replay("--file", plain, *wanted, "--app", "faces")
    assert one_app == replay(*HOUR, *wanted, "--app", "faces")
    assert one_app["recorded"]["queries"] == one_app["policies"][0]["queries"] == 300
    assert one_app["recorded"]["cost"] == pytest.approx(PRICES["cpu"] / 60)  # of its own instance
    assert not one_app["cost"]["comparable"]


def test_a_file_may_have_a_process_of_the_users_own(
    database_dsn: str, reader_dsn: str, replay: Run, tmp_path: Path
) -> None:
    """Its device has the price of a core, as when it ran."""
    kind = container_kind("mine", "1")
    catalogue(database_dsn, hardware=kind)
    record(database_dsn, outcomes(), bills(), [replace(one, hardware=kind) for one in samples()])
    past = tmp_path / "past.mp"
    assert replay(*HOUR, "--export", past, dsn=reader_dsn)["queries"] == 900
    found = replay("--file", past, "--policy", "infaas")
    assert found["recorded"]["queries"] == 900
    assert found["machines"] == [{"kind": kind, "price_per_hour": PRICES["cpu"], "start": 1, "max": 1}]
    assert found["policies"][0]["cost"] > 0.99 * PRICES["cpu"] / 60  # of a minute at least


def test_a_part_of_the_time(replay: Run) -> None:
    found = replay("--from", "2025-11-17T08:00:15Z", "--to", "2025-11-17T09:00:35+01:00", "--policy", "static")
    expected = [row for row in outcomes() if BEGINS + 15 <= row.time < BEGINS + 35]
    assert found["policies"][0]["queries"] == found["recorded"]["queries"] == len(expected)
    assert found["recorded"]["cost"] == pytest.approx(4 * PRICES["cpu"] / 180)
    assert found["policies"][0]["cost"] == pytest.approx(4 * PRICES["cpu"] / 180)
    assert found["policies"][0]["jobs"] == []


def test_the_document_and_a_picture_are_written(replay: Run, tmp_path: Path) -> None:
    kept, drawn = tmp_path / "kept.json", tmp_path / "drawn.png"
    picture = ("--plot", drawn) if find_spec("matplotlib") is not None else ()
    found = replay(*HOUR, "--policy", "static", "--out", kept, *picture)
    written = json.loads(kept.read_text())
    assert (written["recorded"], written["cost"]) == (found["recorded"], found["cost"])
    assert not picture or drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_machines(replay: Run, tmp_path: Path) -> None:
    two = replay(*HOUR, "--worker", "cpu=2", "--policy", "static")
    assert two["policies"][0]["cost"] == pytest.approx(2 * two["recorded"]["cost"])
    file = tmp_path / "machines.toml"
    file.write_text(MACHINES)
    found = replay(*HOUR, "--machines", file)
    assert [one["policy"] for one in found["policies"]] == ["twice"]
    assert found["policies"][0]["cost"] == pytest.approx(2 * 1.5 / 60)
    assert found["policies"][0]["answered"] == 900
    assert "other machines" in found["cost"]["text"]
    example = (ROOT / "docs" / "replay.md").read_text().partition("cheaper.toml <<'END'\n")[2].partition("END\n")[0]
    file.write_text(example)
    found = replay(*HOUR, "--machines", file)
    assert [one["policy"] for one in found["policies"]] == ["infaas", "all from the start"]
    assert found["policies"][1]["cost"] == pytest.approx(6 * 0.06 / 60)
    file.write_text('[scenario]\nobjective = "accuracy"\npolicies = ["infaas"]\n[settings.monitor]\nidle_s = 3\n')
    found = replay(*HOUR, "--machines", file)
    assert [one["policy"] for one in found["policies"]] == ["infaas"]
    assert found["machines"][0]["kind"] == "cpu"  # the recorded ones, where the file names none


def test_machines_that_came_and_went_and_devices_of_several_kinds(
    database_dsn: str, reader_dsn: str, replay: Run
) -> None:
    """Two workers, the second from half-time on; each has a simulated GPU, at the price of a whole one."""
    catalogue(database_dsn)
    late = [row for row in bills(2) if row.worker == "w0" or row.time > BEGINS + 30]
    gpus = [
        event(
            CostEvent, time=row.time, seconds=10.0, worker=row.worker, hardware="gpu", app=None, model=None, variant=None,
            busy_seconds=0.0, cost=10 * PRICES["gpu"] / 3600, simulated=True,
        )
        for row in late
        if row.variant is None
    ]  # fmt: skip
    seen = [row for row in samples(2) if row.worker == "w0" or row.time >= BEGINS + 32]
    devices: list[Any] = [
        event(WorkerSample, time=row.time, worker=row.worker, device="gpu-0", hardware="gpu", utilisation=0.0)
        for row in seen
    ]
    record(database_dsn, outcomes(), sorted([*late, *gpus], key=lambda row: row.time), seen, devices)
    found = replay(*HOUR, "--policy", "infaas", dsn=reader_dsn)
    assert found["machines"] == [{"kind": "gpu", "price_per_hour": pytest.approx(3.06 + 0.192), "start": 1, "max": 2}]
    assert found["recorded"]["cost"] == pytest.approx(1.5 * (3.06 + 0.192) / 60)
    assert found["cost"]["of_simulated_devices"] == pytest.approx(1.5 * 3.06 / 60)
    assert found["recorded"]["series"]["workers"]["gpu"] == [1] * 15 + [2] * 15


def test_people_see_what_is_simulated(
    database_dsn: str, reader_dsn: str, at: At, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue(database_dsn, apps=("digits",))
    record(database_dsn, outcomes(), bills(), samples())
    assert main(["replay", *at(reader_dsn), *HOUR, "--policy", "infaas", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("recorded  ") and "600" in line for line in lines)
    assert any(line.startswith("infaas (simulated)") for line in lines)
    assert "note: 300 queries of apps that are not in the catalogue any more are left out: faces" in lines
    assert any("comparable" in line for line in lines)


def test_what_happened_is_measured_by_who_knew_the_load(
    database_dsn: str, reader_dsn: str, at: At, replay: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue(database_dsn)
    record(database_dsn, outcomes(), bills(), samples())
    found = replay(*HOUR, "--policy", "infaas", "--oracle", dsn=reader_dsn)
    best, recorded = found["oracle"], found["recorded"]
    assert found["cost"]["comparable"]
    assert 0.0 < best["cost"] <= recorded["cost"]
    assert recorded["to_oracle"]["cost"] == pytest.approx(recorded["cost"] / best["cost"])
    assert recorded["to_oracle"]["accuracy"] == pytest.approx(recorded["effective_accuracy"] / best["accuracy"])
    assert found["policies"][0]["to_oracle"]["cost"] >= 1.0
    one = replay(*HOUR, "--policy", "infaas", "--oracle", "--app", "faces", dsn=reader_dsn)
    assert one["recorded"]["to_oracle"]["cost"] is None, "that bill is not one of whole machines"
    assert main(["replay", *at(reader_dsn), *HOUR, "--policy", "infaas", "--oracle"]) == 0
    assert f"recorded: {recorded['to_oracle']['cost']:.2f} times that cost" in capsys.readouterr().out


async def test_a_day_is_compared_with_the_best_possible_once(
    database_dsn: str, reader_dsn: str, replay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recorder, in a process of its own, as the command does. What began and did not end is begun again, and a day without queries has no row.

    A solver in C prints words of its own there.
    """
    loud = "import atexit, ctypes\natexit.register(ctypes.CDLL(None).puts, b'solved')\n"
    (tmp_path / "sitecustomize.py").write_text(loud)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    catalogue(database_dsn)
    record(database_dsn, outcomes(), bills(), samples())
    bus, store = MemoryBus(), Store(database_dsn, "test")
    prices = CatalogWriter(store, {}, 0.99)
    files, counter = FileCopies(bus, Subjects("t"), store), Counter(bus, "none", store)
    edge = RecorderEdge(bus, store, {}, prices, files, counter)
    day = BEGINS // DAY_S * DAY_S
    query = "SELECT extract(epoch FROM time), reason, cost_rate FROM infaas.shadow_events WHERE policy = 'oracle'"
    assert _begin(store, day)  # by a recorder that is ended meanwhile
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        for minutes, ended in ((5, False), (60, True), (60, True)):
            connection.execute(
                "UPDATE infaas.shadow_events SET reason = %(begun)s || (now() - %(ago)s::interval)::text WHERE starts_with(reason, %(begun)s)",
                {"begun": BEGUN, "ago": f"{minutes} min"},
            )
            for began in (day, day - DAY_S):
                await edge.perform(CompareDay(began))
            [(at, said, rate)] = connection.execute(query).fetchall()
            assert at == day
            assert said.startswith(BEGUN) is not ended, said
    store.close()
    with pytest.raises(StoreError, match="the database was away"):  # its row stays as it is
        await best_of("host=127.0.0.1 port=1 dbname=infaas", day, day + DAY_S)
    found = replay("--from", "2025-11-17", "--to", "2025-11-18", "--policy", "infaas", "--oracle", dsn=reader_dsn)
    of, recorded = found["recorded"]["to_oracle"], found["recorded"]
    assert said.startswith(f"{of['cost']:.2f} times the least cost, {of['accuracy']:.1%} of the best accuracy"), said
    assert rate == pytest.approx(found["oracle"]["cost"] * 3600 / recorded["duration_s"])


def test_machines_come_later_where_they_take_longer_to_boot(database_dsn: str, reader_dsn: str, replay: Run) -> None:
    """So many items that the policy orders a second machine at once."""
    catalogue(database_dsn)
    heavy = [replace(row, items=40_000, slo_ms=None) for row in outcomes()]
    record(database_dsn, heavy, bills(), samples())

    def second_at(boot_s: float) -> float:
        [run] = replay(*HOUR, "--policy", "infaas", "--worker", "cpu=1:3", "--boot", boot_s, dsn=reader_dsn)["policies"]
        counts: list[int] = run["series"]["workers"]["cpu"]
        return float(run["series"]["time"][next(i for i, count in enumerate(counts) if count > 1)])

    assert second_at(20.0) - second_at(0.0) == pytest.approx(20.0, abs=5.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "tuesday"), "--from tuesday: is no time: write 2026-11-17"),
        (("--to", "-3x"), "--to -3x: is no time"),
        (("--from", "-1h", "--to", "-2h"), "--to -2h: must be after --from -1h"),
        (("--worker", "cpu"), "--worker cpu: write KIND=N"),
        (("--worker",), "--worker needs a value: write KIND=N after it"),
        (("--policy",), "--policy needs a value: write names of policies after it"),
        (("--slo-target",), "--slo-target needs a value: write shares after it"),
        (("--slo-target", "1"), "--slo-target 1: must be above 0 and below 1"),
        (("--slo-target", "nan"), "--slo-target nan: must be above 0 and below 1"),
        (("--slo-target", "0.9", "0.9"), "--slo-target: a target is given twice"),
        (("--export", "a", "--slo-target", "0.9"), "--slo-target: --export simulates nothing"),
        (("--app",), "--app needs a value: write names of apps after it"),
        (("--worker", "cpu=4:2"), "N must be at most MOST"),
        (("--file", "a", "--from", "-1h"), "--from: a holds one range already"),
        (("--export", "a", "--policy", "infaas"), "--policy: --export simulates nothing"),
        (("--file", "nowhere.mp"), "nowhere.mp: there is no such file"),
        (("--export", "no/such/past.mp"), "--export no/such/past.mp: there is no directory no/such"),
        ((), "nor at any other time: send some (infaas bench), or read a file (--file)"),
        (("--app", "digits"), "--app digits: there is no such app in the catalogue; the apps are: none"),
    ],
)
def test_bad_usage_is_one_line(refused: Refused, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_what_is_not_there_is_named(past: str, refused: Refused, tmp_path: Path) -> None:
    text = refused("--from", "2026-01-01", "--to", "2026-01-02", dsn=past)
    assert "900 are, from 2025-11-17 " in text
    assert "choose --from and --to there" in text
    assert "there were: cpu" in refused(*HOUR, "--worker", "gpu=1", dsn=past)
    assert "there is no policy" in refused(*HOUR, "--policy", "infas", dsn=past)
    file = tmp_path / "machines.toml"
    file.write_text(MACHINES + "[[load]]\n")
    assert f"{file}: load: has no place here" in refused(*HOUR, "--machines", file, dsn=past)
    file.write_text("[scenario]\nobjective = 'speed'\n")
    assert f"{file}: scenario.objective: there is no objective" in refused(*HOUR, "--machines", file, dsn=past)
    file.write_text("settings = 3\n")
    assert f"{file}: settings: must be a table" in refused(*HOUR, "--machines", file, dsn=past)
    file.write_text(MACHINES.replace("cpu = 8", "cpu = -8"))
    assert f"{file}: worker[0].devices.cpu: must be at least 1" in refused(*HOUR, "--machines", file, dsn=past)


def test_a_damaged_file_is_refused_by_file_and_row(replay: Run, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "past.mp"
    replay(*HOUR, "--export", path)
    whole = path.read_bytes()
    head, *rows, count = _values(whole)
    assert count == len(rows) == 900

    def after(*values: Any) -> str:
        path.write_bytes(b"".join(map(msgpack.packb, values)))
        text = refused("--file", path)
        assert text.startswith(f"infaas: {path}: ")
        assert "infaas replay --export" in text
        return text

    assert "row 2: items must be at least 1 and at most 1000000, not 0" in after(
        head, rows[0], [*rows[1][:2], 0, *rows[1][3:]], 2
    )
    assert "row 1: field `slo_ms` must be a number, not a text" in after(head, [*rows[0][:3], "50", *rows[0][4:]], 1)
    assert "row 1: the body must have 11 entries" in after(head, rows[0][:4], 1)
    assert "row 2: time" in after(head, rows[5], rows[1], 2)
    assert "ends after 1 of 2 queries" in after(head, rows[0], 2)
    assert "ends in the middle, after row 1" in after(head, rows[0])
    assert "goes on after its end" in after(head, rows[0], 1, 2)
    assert "is no recording" in after(rows[0])
    assert "has version 9" in after({**head, "version": 9}, 0)
    assert "head: prices.cpu: must be at least 0" in after({**head, "prices": {"cpu": -1.0}}, 0)
    variant = {**head["variants"][0], "max_batch": 0}
    assert "head: variants[0].max_batch" in after({**head, "variants": [variant]}, 0)
    assert "head" in after({key: value for key, value in head.items() if key != "begins"}, 0)
    path.write_bytes(whole[:-700])
    assert "ends in the middle, after row" in refused("--file", path)
    path.write_bytes(b"\xc1 no MessagePack")
    assert "is not valid MessagePack" in refused("--file", path)


def _values(data: bytes) -> list[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return list(unpacker)


def test_strange_rows_are_named(database_dsn: str, reader_dsn: str, refused: Refused) -> None:
    catalogue(database_dsn)
    record(database_dsn, [event(OutcomeEvent, time=BEGINS + 1, slo_ms=-5.0)], bills(), samples())
    text = refused(*HOUR, dsn=reader_dsn)
    assert "app digits: slo_ms must be at least 0 and below 1e+12, not -5" in text
