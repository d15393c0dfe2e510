"""Allowed roots on a real file system: nothing outside is read or written, whatever links say."""

import os
import posixpath
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.memory import MemoryBus
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.jobs import Position
from bus.subjects import Subjects
from services.core.settings import JobsSettings, Settings
from services.jobs.__main__ import wire
from services.jobs.commands import BadUrl, Feed, JobRoute, ParsedUrl, Read, below, parse
from services.jobs.files import BadFile, Files
from tests.support.servers.nats import run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "in.npy").write_bytes(b"inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.npy").write_bytes(b"secret")
    (root / "link.npy").symlink_to(tmp_path / "outside" / "secret.npy")
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "friend").symlink_to(root / "inner")
    return tmp_path


def read(tree: Path, path: Path) -> bytes:
    with Files([tree / "root"]).source(str(path)) as source:
        return source.file.read()


@pytest.mark.parametrize("name", ["inner/in.npy", "friend/in.npy"])
def test_what_is_inside_is_read_also_through_a_link_that_stays(tree: Path, name: str) -> None:
    assert read(tree, tree / "root" / name) == b"inside"


@pytest.mark.parametrize(
    "name", ["link.npy", "away/secret.npy", "../outside/secret.npy", "inner/../../outside/secret.npy"]
)
def test_what_leads_outside_is_forbidden(tree: Path, name: str) -> None:
    with pytest.raises(BadFile, match=r"jobs\.roots") as refused:
        read(tree, tree / "root" / name)
    assert refused.value.forbidden
    with pytest.raises(BadFile, match=r"jobs\.roots|exists"):
        Files([tree / "root"]).check_target(str(tree / "root" / name))


@pytest.mark.parametrize(
    ("name", "says"), [("none.npy", "No such file"), ("inner", "is no file"), ("no/x.npy", "cannot open the directory")]
)
def test_what_cannot_be_read_is_said(tree: Path, name: str, says: str) -> None:
    with pytest.raises(BadFile, match=f"^input: .*{says}"):
        read(tree, tree / "root" / name)


def test_pipes_and_missing_outputs_are_refused(tree: Path) -> None:
    os.mkfifo(tree / "root" / "pipe.npy")
    with pytest.raises(BadFile, match="is no file"):
        read(tree, tree / "root" / "pipe.npy")
    with pytest.raises(BadFile, match="is gone"):
        Files([tree / "root"]).append(str(tree / "root" / "out.npy"), "j1", 10, b"x")


def test_stamps_change_with_files_and_links_are_not_followed(tree: Path) -> None:
    files, path = Files([tree / "root"]), tree / "root" / "inner" / "in.npy"
    with files.source(str(path)) as source:
        before = source.stamp
    path.write_bytes(b"another")
    with files.source(str(path)) as source:
        assert source.stamp != before
    files, path = Files([tree / "root"]), str(tree / "root" / "out.npy")
    files.growing(path, "j1").symlink_to(tree / "outside" / "secret.npy")
    with pytest.raises(OSError, match="symbolic links"):
        files.append(path, "j1", 0, b"x")
    assert (tree / "outside" / "secret.npy").read_bytes() == b"secret"


def test_an_output_grows_hidden_and_gets_its_name_once(tree: Path) -> None:
    files, path = Files([tree / "root"]), str(tree / "root" / "out.npy")
    files.check_target(path)
    files.append(path, "j1", 0, b"abcdef")
    files.append(path, "j1", 3, b"XY")  # from a checkpoint: what was behind it goes
    assert not Path(path).exists()
    assert files.growing(path, "j1").read_bytes() == b"abcXY"
    files.finish(path, "j1")
    files.finish(path, "j1")  # after a crash, once more
    assert Path(path).read_bytes() == b"abcXY"
    assert not files.growing(path, "j1").exists()
    with pytest.raises(BadFile, match="exists already"):
        files.check_target(path)


def test_an_output_that_appeared_meanwhile_is_not_overwritten(tree: Path) -> None:
    files, path = Files([tree / "root"]), tree / "root" / "out.npy"
    files.append(str(path), "j1", 0, b"ours")
    path.write_bytes(b"theirs")
    with pytest.raises(BadFile, match="exists meanwhile"):
        files.finish(str(path), "j1")
    assert path.read_bytes() == b"theirs"
    files.discard(str(path), "j1")
    assert not files.growing(str(path), "j1").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_leave_is_said(tree: Path) -> None:
    (tree / "root" / "inner").chmod(0o500)
    with pytest.raises(BadFile, match=r"^output: cannot write"):
        Files([tree / "root"]).check_target(str(tree / "root" / "inner" / "out.npy"))


@pytest.mark.parametrize("kb", [1, 64])
def test_chunks_of_a_file_in_the_data_directory_have_as_many_kb_as_the_settings_say(tmp_path: Path, kb: int) -> None:
    """64 items of 256 bytes."""
    source, target = tmp_path / "jobs" / "in.npy", tmp_path / "jobs" / "out.npy"
    source.parent.mkdir()
    np.save(source, np.zeros((64, 64), np.float32))
    tensor = TensorSpec(name="x", datatype="FP32", shape=[64])
    urls = [parse(f"file://{path}", field, Subjects()) for path, field in ((source, "input"), (target, "output"))]
    route = JobRoute("j", *urls, Signature(inputs=[tensor], outputs=[tensor]))

    async def main() -> list[int]:
        bus = MemoryBus()
        try:
            [runtime] = await wire(Settings(data_dir=str(tmp_path), jobs=JobsSettings(chunk_kb=kb)), bus)
            read = await runtime.edge.perform(Read(route))
            feed = Feed(route, read.stamp, 64, 0, 0, read.items, Position(), 100, frozenset(), 0)
            return [one.items for one in await runtime.edge.perform(feed)]
        finally:
            await bus.close()

    items = run(main())
    assert sum(items) == 64
    assert (len(items) == 1) is (kb == 64)
    assert max(items) * 256 <= kb * 1024


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///data/in.npy", ParsedUrl("file", "npy", path="/data/in.npy")),
        ("file://localhost/data/in.NDJSON", ParsedUrl("file", "jsonl", path="/data/in.NDJSON")),
        ("file:///a%20b/%C3%A4.mpk", ParsedUrl("file", "msgpack", path="/a b/ä.mpk")),
        ("file:///a//./b.npy", ParsedUrl("file", "npy", path="/a/b.npy")),
        ("nats://things/a/b.jsonl", ParsedUrl("nats", "jsonl", bucket="things", key="a/b.jsonl")),
        ("s3://my.bucket/x.msgpack", ParsedUrl("s3", "msgpack", bucket="my.bucket", key="x.msgpack")),
    ],
)
def test_a_url_names_a_place(url: str, place: ParsedUrl) -> None:
    assert parse(url, "input") == place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/data/in.npy", "must begin with file://"),
        ("http://host/in.npy", "must begin with"),
        ("file://host/in.npy", "three slashes"),
        ("file:///in.csv", "must end in one of .npy, .jsonl"),
        ("file:///", "must end in"),
        ("file:///a/..%2Fb.npy", "may not contain .."),
        ("file:///a/../b.npy", "may not contain .."),
        ("file:///a%00.npy", "names nothing"),
        ("file:///a%FF.npy", "names nothing"),
        ("file:///a.npy?x=1", "%3F"),
        ("file:///a\n.npy", "control characters"),
        ("nats://x.npy", "names nothing"),
        ("nats:///x.npy", "bucket/key"),
        ("nats://infaas-artifacts/x.npy", "the system's own"),
        ("nats://a*b/x.npy", "no name of a bucket"),
        ("file:///" + "a" * 3000 + ".npy", "at most 2000"),
        ("file://[/a.npy", "is no URL"),
    ],
)
def test_what_is_no_place_is_refused_by_field(url: str, says: str) -> None:
    with pytest.raises(BadUrl, match=r"^output: ") as refused:
        parse(url, "output")
    assert says in str(refused.value)


SEGMENTS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "root", "a b", "ä"]), max_size=6)


@given(SEGMENTS, st.booleans())
def test_a_path_never_climbs(segments: list[str], quoted: bool) -> None:
    path = "/".join(["", "root", *segments, "x.npy"])
    try:
        place = parse("file://" + (path.replace(".", "%2E") if quoted else path), "input")
    except BadUrl:
        assert ".." in segments
        return
    assert posixpath.normpath(place.path) == place.path
    assert below(place.path, "/root")


@given(SEGMENTS, SEGMENTS)
def test_below_is_what_the_components_say(inner: list[str], root: list[str]) -> None:
    base = posixpath.normpath("/" + "/".join(part for part in root if part not in ("", ".", "..")))
    path = "/" + "/".join([*root, *inner])
    parts, over = path.split("/")[1:], [part for part in base.split("/") if part]
    plain = not {"", ".", ".."} & set(parts)
    assert below(path, base) == (plain and len(parts) > len(over) and parts[: len(over)] == over)


def test_a_sibling_with_the_same_beginning_is_not_below() -> None:
    assert not below("/data-other/x", "/data")
    assert not below("/data", "/data")
    assert below("/x", "/")
