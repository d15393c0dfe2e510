"""Tables of the command line: as wide as the terminal, the least important columns left out, long texts going on."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infaas.cli.options import moment
from infaas.cli.output import Column, Failure, print_table, progress_bars
from infaas.cli.sql import _render

COLUMNS = (
    Column("name", "name"),
    Column("little", "little", rank=3),
    Column("some", "some", rank=1),
    Column("less", "less", rank=3),
    Column("why", "why", flows=True),
)
ITEM = {"name": "n" * 20, "little": "l" * 20, "some": "s" * 20, "less": "e" * 20, "why": "a reason in words " * 5}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_columns_go_by_rank_the_last_of_equals_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, titles in ((200, "name little some less why"), (100, "name little some why"), (70, "name some why")):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table([ITEM], COLUMNS, "none")
        lines = shown(capsys)
        assert lines[0].split() == titles.split()
        assert max(map(len, lines)) <= width
    print_table([ITEM], COLUMNS, "none", wide=True)
    assert len(shown(capsys)) == 2


def test_what_is_left_out_is_said_beside_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([ITEM], COLUMNS, "none")
    said = capsys.readouterr()
    assert "--wide" not in said.out
    assert said.err == "(not shown: little, less; --wide shows all)\n"


def test_long_texts_go_on_in_their_column_or_the_next_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([ITEM, {**ITEM, "why": "short"}], COLUMNS, "none")
    lines = shown(capsys)
    at = lines[0].index("why")
    assert " ".join(line[at:].strip() for line in lines[1:-1]) == ITEM["why"].strip()
    assert all(not line[:at].strip() for line in lines[2:-1])
    assert lines[-1].endswith("short")
    columns = (Column("model", "a"), Column("variant", "b"), Column("computed\nUS$/1,000", "c"))
    print_table([{"a": "m" * 50, "b": "resnet-50-v1-ort-int8-dynamic-t1-b8", "c": 12.5}], columns, "none")
    assert [line.split() for line in shown(capsys)] == [
        ["model"], ["computed"], ["variant", "US$/1,000"], ["m" * 50], ["resnet-50-v1-ort-int8-dynamic-t1-b8", "12.5"]
    ]  # fmt: skip
    _render({"columns": ["a", "reason"], "rows": [["x" * 80, "y" * 80]]})
    _, _, row, _ = capsys.readouterr().out.splitlines()
    assert row == "x" * 63 + "…  " + "y" * 80


def test_in_a_pipe_nothing_is_wrapped_left_out_or_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    print_table([ITEM], COLUMNS, "none")
    assert [line.split() for line in shown(capsys)] == [[*ITEM], " ".join(ITEM.values()).split()]
    _render({"columns": ["a", "b"], "rows": [["x" * 80, "y"]]})
    assert shown(capsys)[2] == "x" * 80 + "  y"


@given(st.lists(st.dictionaries(st.sampled_from(["name", "some", "why"]), st.text("ab c", max_size=40)), min_size=1))
def test_no_table_is_wider_than_what_must_stay(items: list[dict[str, str]]) -> None:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        print_table(items, COLUMNS, "none")
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    assert len(out.getvalue().splitlines()) > len(items)


def test_progress_without_a_terminal_is_a_line_for_each_new_text(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as told:
        for share in (0.1, 0.2):
            told("uploading", share)
        told("building", 0.3, line=" 30% building", key="building")
        told("building", 0.4, line=" 40% building", key="building")
        told("job j", 1, None, what="j", key="running")
        told("job j, more of it", 2, 9, what="j", key="running")
    assert capsys.readouterr() == ("", "uploading\n 30% building\njob j\n")


# -- How rows are shown to people.


# -- Moments as people write them.
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-17T08:00Z", datetime(2026, 11, 17, 8, tzinfo=UTC)),
        ("2026-11-17T08:00:30.5+02:00", datetime(2026, 11, 17, 6, 0, 30, 500000, tzinfo=UTC)),
        ("2026-11-17 08:00", datetime(2026, 11, 17, 8).astimezone()),
        ("2026-11-17", datetime(2026, 11, 17).astimezone()),
        ("now", NOW),
        ("-24h", NOW - timedelta(hours=24)),
        ("-90m", NOW - timedelta(minutes=90)),
        ("-1.5d", NOW - timedelta(hours=36)),
        ("-2w", NOW - timedelta(weeks=2)),
    ],
)
def test_a_moment(text, expected):
    assert moment(text, "--from", NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "yesterday", "24h", "-h", "2026-13-01", "-1e9y", "-99999999999w", "nan"])
def test_what_is_none_names_option_and_remedy(text):
    with pytest.raises(Failure, match=r"--to .*: is (no time: write 2026-11-17|too long ago)") as refused:
        moment(text, "--to", NOW)
    assert refused.value.code == 2
