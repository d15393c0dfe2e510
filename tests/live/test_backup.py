"""A whole system in a folder and back, and what is left when NATS has lost its disk: the same queries, the same variants."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from infaas.errors import Refused
from services.core.catalog import files_of
from tests.support.models import tiny_models
from tests.support.servers.processes import eventually, infaas
from tests.support.servers.system import QUICK, Whole, running, talk

MODELS = {"first": tiny_models.mlp(seed=1), "second": tiny_models.mlp(seed=2)}
X, _ = tiny_models.digits(3)
OPTIONS = ("--no-dashboard", "--no-gateway")
PAUSE = 0.01  # s between queries
DONE = "SELECT count(*) FROM infaas.registrations WHERE state = 'done'"
INSERT = "INSERT INTO infaas_internal.files VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
NOW = {"state", "instances", "reclaimable", "batching", "hop_ms", "hop_quantiles_ms", "cost_per_1000"}  # docs/backup.md


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backup")


@pytest.fixture(scope="module")
def settings(place: Path) -> tuple[str, ...]:
    (place / "infaas.toml").write_text(QUICK)
    return (*OPTIONS, "--config", str(place / "infaas.toml"))


@pytest.fixture(scope="module")
def saved(place: Path, settings: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A backup that was taken under load, and what its system had and answered."""
    with running(place / "old", *settings) as old:
        for app, model in MODELS.items():
            old.register(app, model)
        old.done("admin", "set-batching", "--app", "first", "--policy", "fixed", "--batch", "4")
        old.done("admin", "set-target", "first", "--slo-target", "0.8")
        assert eventually(lambda: old.rows(DONE) == [(len(MODELS),)]), "a backup has what is in SQL"
        said = talk(old, lambda client: _under_load(client, old, place / "copy"))
        files = {path.name for path in (place / "copy" / "files").iterdir()}
        yield {**said, "variants": _variants(old), "files": files, "old": place / "old"}


async def _under_load(client: Any, old: Whole, folder: Path) -> dict[str, Any]:
    """Queries go on from before a backup until after it."""
    answers, refused, done = list[Any](), list[Refused](), asyncio.Event()

    async def one() -> None:
        try:
            answers.append(await client.query("first", X[:1], latency_ms=20_000))
        except Refused as error:
            refused.append(error)

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            while not done.is_set():
                group.create_task(one())
                await asyncio.sleep(PAUSE)

    loading = asyncio.create_task(load())
    while not (answers or refused):  # noqa: ASYNC110
        await asyncio.sleep(PAUSE)
    backup = await asyncio.to_thread(old.command, "backup", str(folder), "--keys", "--json")
    done.set()
    await loading
    assert backup.returncode == 0, backup.stderr
    assert "file 1 of" in backup.stderr
    assert not refused
    return {"answers": await _ask(client), "during": len(answers)}


async def _ask(client: Any) -> list[tuple[str, Any]]:
    found = []
    for app in MODELS:
        for accuracy in (0.0, 0.05):
            answer = await client.query(app, X[:3], accuracy=accuracy, latency_ms=20_000)
            found.append((answer.variant, answer.output.tolist()))
    return found


def _variants(system: Whole) -> list[dict[str, Any]]:
    return sorted(
        ({name: one[name] for name in one.keys() - NOW} for one in system.told("variants")), key=itemgetter("variant")
    )


def _sql(system: Whole) -> psycopg.Connection[Any]:
    return psycopg.connect(json.loads((system.directory / "endpoints.json").read_text())["writer"])


def _mirrored(system: Whole, apps: int, variants: int) -> bool:
    """Whether SQL has so many records, and all files that they name."""
    with _sql(system) as connection:
        records = connection.execute("SELECT key, body FROM infaas.catalog WHERE bucket = 'catalog'").fetchall()
        there = {digest for (digest,) in connection.execute("SELECT digest FROM infaas_internal.files")}
    kinds = Counter(key.partition(".")[0] for key, _ in records)
    needed = {digest for key, body in records for digest in files_of(key, body)}
    return (kinds["app"], kinds["variant"]) == (apps, variants) and needed <= there


def test_a_backup_under_load_is_restored_into_an_empty_system_once(
    saved: dict[str, Any], place: Path, settings: tuple[str, ...]
) -> None:
    assert saved["during"] > 0
    assert (place / "copy" / "keys" / "writer.secret").stat().st_mode & 0o077 == 0
    with running(place / "new", *settings) as new:
        restored = new.told("restore", str(place / "copy"))
        assert restored["files"] == len(saved["files"]) > 0
        assert _variants(new) == saved["variants"]
        assert talk(new, _ask) == saved["answers"]
        target = "SELECT own_target, slo_target FROM infaas.apps WHERE app = 'first'"
        assert eventually(lambda: new.rows(target) == [(True, 0.8)])
        rows = "SELECT count(*) FROM infaas.query_outcomes WHERE app = 'first'"
        counted = "SELECT sum(queries) FROM infaas.slo_by_app_minutely WHERE app = 'first'"
        assert eventually(lambda: new.rows(rows) == new.rows(counted) > [(0,)]), new.rows(rows)
        assert new.rows(DONE) == [(len(MODELS),)]
        again = new.command("restore", str(place / "copy"))
        assert again.returncode == 1
        assert "is not empty: its catalogue has" in again.stderr
        assert "infaas up --data-dir NEW" in again.stderr


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda copy: (copy / "manifest.json").unlink(), "has no manifest.json"),
        (lambda copy: (copy / "catalogue").write_bytes(b"?"), "catalogue is not as it was"),
        (lambda copy: shutil.rmtree(copy / "history"), "history/infaas.client_errors is not there"),
    ],
)
def test_a_damaged_backup_is_refused_before_anything_is_looked_at(
    harm: Any, told: str, saved: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    del saved
    shutil.copytree(place / "copy", tmp_path / "copy")
    harm(tmp_path / "copy")
    done = infaas("restore", str(tmp_path / "copy"), "--data-dir", str(tmp_path / "nothing runs here"))
    assert done.returncode == 1
    assert told in done.stderr


def test_a_nats_that_lost_its_disk_gets_back_all_that_was_registered(
    place: Path, settings: tuple[str, ...], tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    with running(directory, *settings) as system:
        for app, model in MODELS.items():
            system.register(app, model)
        variants, answers = _variants(system), talk(system, _ask)
        assert eventually(lambda: _mirrored(system, len(MODELS), len(variants)))
        early = system.command("catalog", "restore")
        assert early.returncode == 1
        assert "--missing writes those that are not there" in early.stderr
        with _sql(system) as connection:
            copies = connection.execute("DELETE FROM infaas_internal.files RETURNING *").fetchall()
        whole = {"records": 0, "files": 0, "damaged": [], "uncopied": []}
        assert system.told("catalog", "restore", "--missing") == whole, "what is not copied yet is whole on NATS"
        with _sql(system) as connection:
            connection.cursor().executemany(INSERT, copies)
    shutil.rmtree(directory / "nats")
    refused = infaas("up", "--data-dir", str(directory), *settings)
    assert refused.returncode == 1
    assert "infaas catalog restore" in refused.stderr
    with running(directory, *settings, INFAAS_BUS__ADOPT="true") as system:
        assert system.told("models") == []
        with _sql(system) as connection:
            copies = connection.execute("DELETE FROM infaas_internal.files RETURNING *").fetchall()
        lost = system.command("catalog", "restore")
        assert lost.returncode == 1
        assert "lost on NATS before they were copied to SQL: model." in lost.stderr
        assert "damaged" not in lost.stderr
        with _sql(system) as connection:
            connection.cursor().executemany(INSERT, copies)
        assert system.told("catalog", "restore", "--missing")["uncopied"] == []
        assert _variants(system) == variants
        assert talk(system, _ask) == answers


def test_a_file_that_the_disk_changed_is_mended_from_its_copy(
    place: Path, settings: tuple[str, ...], tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    with running(directory, *settings) as system:
        system.register("first", MODELS["first"])
        answered = talk(system, _one)
        assert eventually(lambda: _mirrored(system, 1, len(system.told("variants"))))
    loaded = [path.read_bytes() for path in (directory / "workers").rglob("*.onnx")]
    assert loaded, "the worker has a copy of what it has loaded"
    shutil.rmtree(directory / "workers")
    for block in directory.glob("nats/jetstream/*/streams/OBJ_infaas-artifacts/msgs/*.blk"):
        body = bytearray(block.read_bytes())
        for file in loaded:
            if (at := body.find(file[len(file) // 2 :][:64])) >= 0:
                body[at] ^= 1
        block.write_bytes(body)
    with running(directory, *settings) as system:
        # The load that finds it has it mended, and a later one serves.
        assert eventually(lambda: talk(system, lambda client: _one(client, answered[0])) == answered)
        told = "SELECT count(*) > 0 FROM infaas.state_events WHERE reason LIKE 'the model''s file cannot be read: object%%'"
        assert eventually(lambda: system.rows(told) == [(True,)])
        mended = system.command("catalog", "restore", "--missing", "--json")
        assert mended.returncode == 0, mended.stderr
        assert json.loads(mended.stdout) == {"records": 0, "files": 0, "damaged": [], "uncopied": []}


async def _one(client: Any, variant: str | None = None) -> tuple[str, Any] | None:
    answer = await client.query("first", X[:3], latency_ms=20_000, variant=variant, raise_refused=variant is None)
    return None if isinstance(answer, Refused) else (answer.variant, answer.output.tolist())
