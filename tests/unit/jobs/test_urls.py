import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.jobs.commands import BadUrl, ParsedUrl, below, parse


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
