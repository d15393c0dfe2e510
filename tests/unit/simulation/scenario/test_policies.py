"""Which policies run, with which machines, choices and settings."""

import pytest

from services.core.settings import Settings, StaticVariant
from services.core.toml import TomlError
from tests.support.data.small_scenarios import changed, read


def policy(tmp_path, *changes, **says):
    """The policy of one [[policy]] block."""
    (found,) = read(
        tmp_path, changed(("scenario.policies", ...), ("policy", [{"name": "mine"} | says]), *changes)
    ).policies
    return found


def test_built_in_names_are_what_they_are_in_settings(tmp_path):
    names = ["infaas", "infaas-ilp", "clipper+", "static", "sm+", "replicate", "round-robin", "brute-force"]
    found = read(tmp_path, changed(("scenario.policies", names))).policies
    assert [(p.name, p.base, p.settings.dispatcher.policy, p.settings.autoscaler.policy) for p in found] == [
        ("infaas", "infaas", "infaas", "infaas"),
        ("infaas-ilp", "infaas", "infaas", "infaas"),
        ("clipper+", "static", "infaas", "static"),
        ("static", "static", "infaas", "static"),
        ("sm+", "replicate", "infaas", "replicate"),
        ("replicate", "replicate", "infaas", "replicate"),
        ("round-robin", "round-robin", "round-robin", "infaas"),
        ("brute-force", "brute-force", "brute-force", "infaas"),
    ]  # fmt: skip


def test_settings_of_a_policy_lie_over_those_of_all_and_of_production(tmp_path) -> None:
    found, production = read(tmp_path, changed(("scenario.policies", ["infaas"]))).policies[0].settings, Settings()
    assert (found.dispatcher, found.autoscaler) == (production.dispatcher, production.autoscaler)
    common = ("settings", {"autoscaler": {"hold_s": 9, "slack": 1.2}, "monitor": {"least_items": 3}})
    found = policy(tmp_path, common, base="infaas", settings={"autoscaler": {"hold_s": 2}}).settings
    assert (found.autoscaler.hold_s, found.autoscaler.slack, found.monitor.least_items) == (2, 1.2, 3)
    assert found.monitor.memory_share == 1.0
    accurate = ("scenario.objective", "accuracy")
    assert policy(tmp_path, base="infaas").settings.goal == "cost"
    assert policy(tmp_path, accurate, base="infaas").settings.goal == "accuracy"
    assert policy(tmp_path, accurate, base="infaas", settings={"goal": "cost"}).settings.goal == "cost"


def test_blocks_run_after_the_names_or_in_their_place_and_a_command_overrides_all(tmp_path):
    blocks = (
        "policy",
        [{"name": "mine", "base": "sm+"}, {"name": "infaas", "settings": {"autoscaler": {"slack": 2.0}}}],
    )
    tree = changed(blocks, ("scenario.policies", ["infaas", "clipper+"]))
    assert [p.name for p in read(tmp_path, tree).policies] == ["infaas", "clipper+", "mine"]
    assert read(tmp_path, tree).policies[0].settings.autoscaler.slack == 2.0
    assert [p.name for p in read(tmp_path, tree, policies=["static", "mine"]).policies] == ["static", "mine"]
    assert [p.name for p in read(tmp_path, changed(("scenario.policies", ...))).policies] == ["infaas"]
    assert read(tmp_path, tree, seed=7).seed == 7


def test_the_target_of_all_apps_may_be_stated_in_either_place_but_not_in_both(tmp_path):
    short, long = ("autoscaler.slo_target", 0.9), ("settings.autoscaler.slo_target", 0.9)
    other = ("settings.autoscaler.slack", 1.2)
    for stated in ((short, other), (long, other)):
        autoscaler = policy(tmp_path, *stated, base="infaas").settings.autoscaler
        assert (autoscaler.slo_target, autoscaler.slack) == (0.9, 1.2)
    assert policy(tmp_path, base="infaas").settings.autoscaler.slo_target == 0.99
    means = policy(tmp_path, ("autoscaler", {"accuracy_mean": 0.8, "worth": 2}), base="infaas").settings.autoscaler
    assert (means.accuracy_mean, means.worth) == (0.8, 2.0)
    own = {"autoscaler": {"slo_target": 0.5}}
    assert policy(tmp_path, short, base="infaas", settings=own).settings.autoscaler.slo_target == 0.5
    with pytest.raises(TomlError, match=r"autoscaler.slo_target: is stated in \[settings.autoscaler\], too"):
        read(tmp_path, changed(short, long))


def test_a_static_system_has_what_its_apps_need_at_their_peak(tmp_path):
    found = policy(tmp_path, base="static")
    # faces: 84 items/s with the slack; A at 0.2 US$/h serves none within 300 ms but 5/s idling: one B does all.
    assert found.settings.autoscaler.choice == {
        "faces": StaticVariant(variant="B", instances=1),
        "cars": StaticVariant(variant="B", instances=1),
    }
    assert found.settings.autoscaler.choice["faces"].variant == "B"
    assert [(m.start, m.minimum, m.maximum) for m in found.machines] == [(2, 2, 2), (1, 1, 1)]


@pytest.mark.parametrize(("rate", "instances"), [(1, 1), (4.9, 2), (12, 3), (100, 4)])
def test_instances_carry_the_peak_and_no_more_than_the_machines_hold(tmp_path, rate, instances):
    """Eight cores in two machines: four instances of four threads at a time."""
    slow = ("app.0.latency_ms", 1000), ("load.0.rate", [[0, 0], [30, rate]])
    found = policy(tmp_path, *slow, base="static", hardware=["cpu"], start={"cpu": 2})
    assert found.settings.autoscaler.choice == {"faces": StaticVariant(variant="A", instances=instances)}


def test_the_fastest_serves_and_memory_bounds_what_is_static(tmp_path) -> None:
    found = policy(tmp_path, ("app.0.latency_ms", 5), ("load.0.rate", 10), base="clipper+")
    assert found.settings.autoscaler.choice["faces"] == StaticVariant(variant="B", instances=1)
    tight = ("variant.1.memory_gb", 9), ("app.0.latency_ms", 200), ("load.0.rate", 2000)
    found = policy(tmp_path, *tight, base="static", start={"gpu": 1})
    # one each, though the device holds but one
    assert sum(one.instances for one in found.settings.autoscaler.choice.values()) == 2


def test_what_is_said_is_chosen(tmp_path):
    said = ("baseline", {"faces": {"variant": "A", "instances": 3}})
    assert policy(tmp_path, said, base="static").settings.autoscaler.choice["faces"] == StaticVariant(
        variant="A", instances=3
    )
    assert policy(tmp_path, said, base="sm+").settings.autoscaler.choice["faces"] == StaticVariant(
        variant="A", instances=1
    )
    assert policy(tmp_path, said, base="static", hardware=["gpu"]).settings.autoscaler.choice["faces"].variant == "B"
    own = {"faces": {"variant": "B", "instances": 2}}
    assert policy(tmp_path, said, base="static", choice=own).settings.autoscaler.choice["faces"] == StaticVariant(
        variant="B", instances=2
    )
    assert policy(tmp_path, said, base="infaas").settings.autoscaler.choice == {}


def test_machines_of_a_policy(tmp_path):
    def counts(**says):
        return [(m.start, m.minimum, m.maximum) for m in policy(tmp_path, base="infaas", **says).machines]

    assert counts() == [(2, 1, 4), (1, 1, 3)]
    assert counts(start={"gpu": 7}) == [(0, 0, 4), (7, 1, 7)]
    assert counts(hardware=["gpu"]) == [(0, 0, 0), (1, 1, 3)]  # nobody pays for machines that may not be used
    assert counts(hardware=["cpu"]) == [(2, 1, 4), (1, 1, 3)]  # the other has a CPU too
    assert counts(hardware=["gpu"], start={"cpu": 1}) == [(1, 1, 4), (0, 0, 3)]
    assert counts(max={"cpu": 9}, min={"gpu": 0}) == [(2, 1, 9), (1, 0, 3)]


def test_a_class_of_ones_own_is_found_beside_the_file(tmp_path):
    (tmp_path / "scenario_policy_of_mine.py").write_text(
        "from services.core.selection.policy import RoundRobin\nclass Mine(RoundRobin):\n    name = 'mine'\n"
        "class Broken:\n    def __init__(self): raise RuntimeError('not today')\n"
        "class Scales:\n    name = 'scales'\n    def scale(self, problem, now): return {}\n"
        "class Both(Mine, Scales):\n    pass\n"
        "class Watches:\n    name = 'watches'\n    def observe(self, outcome): pass\n"
    )
    (found,) = read(tmp_path, changed(), policies=["scenario_policy_of_mine:Mine"]).policies
    assert (found.base, found.settings.dispatcher.policy) == ("scenario_policy_of_mine:Mine",) * 2
    with pytest.raises(TomlError, match="cannot be loaded: RuntimeError: not today"):
        read(tmp_path, changed(), policies=["scenario_policy_of_mine:Broken"])
    for name, expected in {"Mine": (True, False), "Scales": (False, True), "Both": (True, True)}.items():
        path = f"scenario_policy_of_mine:{name}"
        (found,) = read(tmp_path, changed(), policies=[path]).policies
        decides = (found.settings.dispatcher.policy, found.settings.autoscaler.policy)
        assert decides == tuple(path if own else "infaas" for own in expected)
    with pytest.raises(TomlError, match=r"policies\[0\]: .* give it select or scale"):
        read(tmp_path, changed(), policies=["scenario_policy_of_mine:Watches"])
