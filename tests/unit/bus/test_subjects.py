"""Subjects, wildcards, keys and the names below a prefix."""

import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.port import BusError
from bus.subjects import Subjects, check_key, check_pattern, check_subject, matches, valid_name

tokens = st.sampled_from(["a", "b", "ab", "é"])
subjects = st.lists(tokens, min_size=1, max_size=5).map(".".join)
patterns = st.tuples(st.lists(st.one_of(tokens, st.just("*")), max_size=4), st.booleans()).map(
    lambda parts: ".".join([*parts[0], *([">"] if parts[1] or not parts[0] else [])])
)


@given(patterns, subjects)
def test_wildcards_mean_what_an_expression_says(pattern: str, subject: str) -> None:
    words = {"*": "[^.]+", ">": ".+"}
    expression = r"\.".join(words.get(token) or re.escape(token) for token in pattern.split("."))
    assert matches(pattern, subject) == (re.fullmatch(expression, subject) is not None)


@given(patterns)
def test_a_well_formed_pattern_passes(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("subject", ["a" * 1001, "é" * 501, "a." * 4000 + "a"])
def test_a_subject_that_would_cost_the_connection_is_refused(subject: str) -> None:
    """Servers end a connection whose control line is longer than 4096 bytes."""
    with pytest.raises(BusError, match="longer than"):
        check_subject(subject)
    check_subject(subject[:500])


@given(st.text(max_size=20))
def test_what_passes_as_a_subject_stays_on_its_line(text: str) -> None:
    try:
        check_subject(text)
    except BusError:
        return
    line = f"PUB {text} 0".encode()
    assert len(re.split(rb"[ \t\r\n]", line)) == 3
    assert b"\0" not in line


@given(st.text(max_size=70))
def test_a_valid_name_is_one_token_and_a_file_name(text: str) -> None:
    if valid_name(text):
        assert 1 <= len(text) <= 64
        assert not set(text) & set(" .*>/\\\0\r\n\t$")
        assert text[0].isalnum()
        check_pattern(f"a.{text}.b")
        check_key(f"variant.{text}")


@pytest.mark.parametrize("name", ["a", "A9", "resnet50-v1_int8", "0", "a" * 64])
def test_good_names(name: str) -> None:
    assert valid_name(name)


@pytest.mark.parametrize(
    "name", ["", "-a", "_a", "a.b", "a b", "../x", "a/b", "a*", ">", "a\0", "a\n", "é", "a" * 65, None, 7, b"a"]
)
def test_bad_names(name: object) -> None:
    assert not valid_name(name)


def every_name(prefix: str) -> list[str]:
    """All subjects, streams and buckets of a prefix, with `x` wherever something is to be filled in."""
    made = Subjects(prefix)
    found: list[str] = []
    for name, member in inspect.getmembers(Subjects):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found.append(getattr(made, name))
        elif inspect.isfunction(member):
            count = len(inspect.signature(member).parameters) - 1
            found.append(getattr(made, name)(*["x"] * count))
    return found


def test_names_of_two_prefixes_are_apart_and_can_be_listened_to() -> None:
    one, two = every_name("infaas"), every_name("infaas2")
    assert len(one) > 20
    assert len(set(one)) == len(one)
    assert not set(one) & set(two)
    for pattern in one:
        assert not any(matches(pattern, subject) for subject in two)
    for subject in every_name("infaas"):
        check_pattern(subject)


def test_who_listens_where() -> None:
    names = Subjects("p")
    assert matches(names.query(), names.query("faces"))
    assert matches(names.undelivered("d1"), names.undelivered("d1", "0a1b"))
    assert not matches(names.undelivered("d1"), names.done("d1"))
    assert not matches(names.undelivered("d1"), names.undelivered("d2", "0a1b"))
    assert matches(names.worker_heartbeat(), names.worker_heartbeat("w0"))
    assert not matches(names.worker_heartbeat(), names.dispatcher_heartbeat("d0"))
