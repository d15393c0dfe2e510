"""`infaas release list` and `show`; the verbs that change releases are operators' (infaas/cli/admin.py)."""

from typing import Any

from infaas.cli.options import DataDir, Json, Wide
from infaas.cli.output import Column, fail, print_table, show, when
from infaas.connecting import with_client

Item = dict[str, Any]
_EMPTY = "no releases yet: `infaas release start APP --model M` begins one"
_WIDTH = 41  # characters of the picture


def releases(app: str | None = None, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """List the last release of each app: its versions, state and share of the queries, and what it waits for.

    Parameters
    ----------
    app
        List only this app's.

    """
    items = with_client(data_dir, lambda client: client.releases(app=app))
    show({"items": items}, json, lambda document: print_table(document["items"], _RELEASES, _EMPTY, wide=wide))
    return 0


def show_release(app: str, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """Show how the new version of an app's release does beside the old one: each measure of each step, with the interval of the difference.

    More is better in all of them: the shares of right answers by labels, of answers without an error, of those in time, of those
    that are as fast as the old version's, of those of the class (or of all others) whose share differs most, and of those that are as the old
    version's. Step 0 is the mirror. All intervals hold together, at every moment, with a probability of 99 %.

    Example: `infaas release show digits`

    Parameters
    ----------
    app
        The app.

    """
    found = with_client(data_dir, lambda client: client.releases(app=app))
    if not found:
        fail(f"{app} has had no release: `infaas release start {app} --model M` begins one")
    show(found[0], json, lambda item: _render(item, wide))
    return 0


def _render(item: Item, wide: bool) -> None:
    at = f", step {item['step'] + 1} of {len(item['steps'])}" if item["state"] in ("step", "paused") else ""
    at = f" of a share of {item['mirror']:g}" if item["state"] == "mirror" else at
    print(f"{item['app']}: {item['model']} version {item['old_version']} -> {item['version']}: {item['state']}{at}")
    print(f"share {item['share']:g} of the queries, since {when(item['since'])}: {item['reason']}")
    if item["lacks"]:
        print(f"waits for {item['lacks']}")
    reach = max((abs(one[end]) for one in item["figures"] for end in ("low", "high")), default=1.0)
    rows = [one | {"picture": _picture(one, min(1.0, reach))} for one in item["figures"]]
    print_table(rows, _FIGURES, "nothing was counted yet", wide=wide)


def _picture(one: Item, reach: float) -> str:
    """The interval on a line from -reach to reach: : is no difference, | the margin."""
    line = [" "] * _WIDTH

    def place(value: float) -> int:
        return round((min(max(value / reach, -1.0), 1.0) + 1.0) / 2.0 * (_WIDTH - 1))

    for i in range(place(one["low"]), place(one["high"]) + 1):
        line[i] = "-"
    line[place(-one["margin"])], line[place(0.0)] = "|", ":"
    line[place(one["new"] - one["old"])] = "o"
    return "".join(line).rstrip()


_RELEASES = (
    Column("app", "app"),
    Column("model", "model", rank=3),
    Column("old", "old_version", rank=1),
    Column("new", "version"),
    Column("state", "state"),
    Column("share", "share"),
    Column("since", lambda item: when(item["since"]), rank=4),
    Column("waits for, or reason", lambda item: item["lacks"] or item["reason"], flows=True),
)
_FIGURES = (
    Column("step", "step"),
    Column("measure", lambda one: f"{one['measure']} ({one['of']})" if one["of"] else one["measure"]),
    Column("new", "new"),
    Column("of", "new_n", rank=2),
    Column("old", "old"),
    Column("of ", "old_n", rank=3),
    Column("difference", lambda one: f"{one['low']:+.4f} to {one['high']:+.4f}"),
    Column("margin", "margin", rank=4),
    Column("", "picture", rank=5),
)
