"""The table of decision overhead: every row is there, and the bars hold."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benches" / "paper"))

import compare
from table7 import measured


def test_the_table_has_all_rows_and_decisions_are_as_quick_as_they_must_be() -> None:
    """INFaaS, Table 7: by name within 1 ms, by needs within 3.5 ms, ten times as fast as brute force. Ours take microseconds."""
    figure = measured(100, 1, most=1000)
    ours = {row.what: row.mean for row in figure.rows}
    assert len(compare.table(figure).splitlines()[2:]) == len(ours) == 18, "no row stands twice"
    assert all(0.0 < value < float("inf") for value in ours.values())
    states = ("(a) not Active", "(b) Active")
    seen = ("needs asked before", "needs never seen")
    for state in states:
        for needs in seen:
            assert ours[f"a variant by name, {state}, {needs}: median"] <= 1000.0
            assert ours[f"app, > 72 %, 20 ms, {state}, {needs}: median"] <= 3500.0
            assert ours[f"app, > 72 %, 20 ms, {state}, {needs}: times as fast as brute force"] >= 10.0
        assert f"app, > 72 %, 20 ms, {state}, by brute force: median" in ours
    for needs in (*seen, "after a change"):
        assert ours[f"1,000 variants: app, > 72 %, 20 ms, (b) Active, {needs}: median"] <= 5000.0
