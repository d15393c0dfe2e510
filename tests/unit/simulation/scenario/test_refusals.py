"""What a scenario cannot say is refused, with file, key and reason, before anything runs."""

import re
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.toml import TomlError
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import derive, read_scenario
from tests.support.data.examples import examples
from tests.support.data.small_scenarios import SOUND, changed, read

V0, V1, W0, L0, P0 = "variant.0", "variant.1", "worker.0", "load.0", "policy.0"
INF, NAN = float("inf"), float("nan")
POINTS = [[0, 4], [60, 4]]

BAD = [
    # path, value, what the refusal says after the file's name
    ("scenario", ..., "scenario: is missing"),
    ("scenario", [{"duration_s": 60}], "scenario: must be written [scenario], once"),
    ("scenario.duration_s", ..., "scenario.duration_s: is missing: it must be above 0"),
    ("scenario.seed", {"a": True}, "scenario.seed: must be a whole number, not { a = true }"),
    ("zzz", 3, "zzz: there is no such key; there are app, "),
    ("scenario.duration_s", 0, "scenario.duration_s: must be above 0 and at most 1e+07, not 0"),
    ("scenario.duration_s", "60", "scenario.duration_s: must be a number, not '60'"),
    ("scenario.durations", 60, "scenario.durations: there is no such key; did you mean duration_s?"),
    ("scenario.seed", -1, "scenario.seed: must be at least 0 and at most"),
    ("scenario.objective", "costs", "scenario.objective: there is no objective 'costs'; did you mean cost?"),
    ("scenario.metrics_every_s", 61, "scenario.metrics_every_s: must be above 0 and at most 60"),
    ("scenario.metrics_every_s", 1e-6, "scenario.metrics_every_s: would be 6e+07 samples"),
    ("scenario.policies", [], "scenario.policies: must name at least one policy"),
    ("scenario.policies", ["infas"], "scenario.policies[0]: there is no policy 'infas'; did you mean infaas?"),
    ("scenario.policies", ["infaas", "infaas"], "scenario.policies[1]: infaas occurs twice"),
    ("scenario.policies", ["no_such_module:X"], "scenario.policies[0]: 'no_such_module:X' cannot be loaded: there is no module"),
    ("scenario.policies", ["json:JSONDecoder"], "scenario.policies[0]: 'json:JSONDecoder' lacks a `name`, a text"),
    ("scenario.policies", ["json:loads"], "scenario.policies[0]: 'json:loads' cannot be loaded"),
    ("duration_s", 60, "duration_s: has no place here: write it in [scenario]"),
    ("slack", 1.1, "slack: has no place here: write it as [settings.autoscaler] slack"),
    ("loads", [], "loads: there is no such key; did you mean load?"),
    ("app", {"name": "faces"}, "app: must be written [[app]]"),
    ("app.1.name", "faces", "app[1].name: faces occurs twice"),
    ("app.0.latency_ms", -300, "app[0].latency_ms: must be milliseconds, above 0, not -300"),
    ("app.0.accuracy", 75, "app[0].accuracy: must be at least 0 and at most 1, not 75"),
    ("app.0.slo_target", 1, "app[0].slo_target: must be above 0 and below 1, not 1"),
    ("autoscaler", 3, "autoscaler: must be a table, not 3"),
    ("autoscaler.slack", 1.1, "autoscaler.slack: has no place here: write it as [settings.autoscaler] slack"),
    ("app.0.selection", "best", "app[0].selection: policy: must be one of exp3"),
    ("app.0.selection", "module:Class", "app[0].selection: policy: module:Class runs in a process of its own"),
    ("app.0.selection", 3, "app[0].selection: must be a policy, or a table of a selection, not 3"),
    ("app.0.selection", {"polcy": "exp4"}, "app[0].selection.polcy: there is no such key; did you mean policy?"),
    ("app.0.selection", {"policy": "exp4", "eta": 2}, "app[0].selection.eta: must be at least 0 and at most 1, not 2"),
    ("app.0.selection", {"policy": "exp4", "members": ["X"]}, "app[0].selection: members: no [[variant]] of model X"),
    (f"{L0}.feedback", 0.5, "load[0].feedback: means nothing for an [[app]] without `selection`"),
    (f"{L0}.repeats", 0.5, "load[0].repeats: means nothing"),
    ("app.0.batching", "best", "app[0].batching: policy: 'best' is unknown; use one of edf"),
    ("app.0.batching", "fixed", "app[0].batching: batch: fixed needs it"),
    ("app.0.batching", 3, "app[0].batching: must be a policy, or a table of batching, not 3"),
    (f"{V0}.batching", {"size": 3}, "variant[0].batching.size: there is no such key"),
    (f"{V0}.batching", {"policy": "aimd", "slo_ms": INF}, "variant[0].batching.slo_ms: must be above 0 and at most"),
    ("app.0.qps", 10, "app[0].qps: has no place here: state the number of queries in [[load]]"),
    ("app.2", {"name": "boats"}, "app[2]: no [[variant]] serves boats"),
    ("variant", [], "variant: there must be at least one [[variant]]"),
    (f"{V0}.app", [], "variant[0].app: must name at least one app"),
    (f"{V1}.app.1", "car", "variant[1].app[1]: there is no [[app]] 'car'; did you mean cars?"),
    (f"{V0}.name", "a.b", "variant[0].name: must be 1 to 64 letters"),
    (f"{V1}.name", "A", "variant[1].name: A occurs twice"),
    (f"{V0}.hardware", "tpu", "variant[0].hardware: there is no device 'tpu' on any [[worker]]; did you mean gpu?"),
    (f"{V0}.latency", 3, "variant[0].latency: there is no such key; did you mean latency_ms?"),
    (f"{V0}.latency_ms", ..., "variant[0].latency_ms: is missing: say how long a batch takes"),
    (f"{V0}.max_batch", 0, "variant[0].max_batch: must be at least 1 and"),
    (f"{V0}.load_s", -1, "variant[0].load_s: must be at least 0 and at most 1e+06, not -1"),
    (f"{V0}.accuracy", 1.5, "variant[0].accuracy: must be at least 0 and at most 1"),
    (f"{V1}.memory_gb", 17, "variant[1].memory_gb: 17 GB of memory are more than any gpu has (16 GB)"),
    (f"{V0}.uses.cpu_cores", 9, "variant[0].uses.cpu_cores: 9 cores are more than any cpu has (8)"),
    (f"{V0}.uses.cpu_cores", 0.5, "variant[0].uses.cpu_cores: must be a whole number"),
    (f"{V0}.uses.cpu_core", 4, "variant[0].uses.cpu_core: there is no such key; did you mean cpu_cores?"),
    (f"{V1}.uses", {"gpu_memory_gb": 17}, "variant[1].memory_gb: is 1.3, while uses says 17"),
    (f"{V1}.batch_latency_ms", {}, "variant[1].batch_latency_ms: must name at least one batch size"),
    (f"{V1}.batch_latency_ms", {"1": 15.0, "8": 9.0}, "variant[1].batch_latency_ms.8: 9 ms is less than a batch of 1"),
    (f"{V1}.batch_latency_ms", {"0": 15.0}, "variant[1].batch_latency_ms.0: must be at least 1 and at most 65536, not 0"),
    (f"{V1}.batch_latency_ms", {"1": 1.0, "01": 2.0}, "variant[1].batch_latency_ms.01: 1 occurs twice"),
    (f"{V1}.batch_latency_ms", {"one": 15.0}, "variant[1].batch_latency_ms.one: must be a whole number, not 'one'"),
    (f"{V1}.saturation_qps", 500, "variant[1].saturation_qps: 500 queries/s is more than the best batch can do (363.6"),
    (f"{V1}.base_ms", 3, "variant[1].base_ms: says the same as batch_latency_ms"),
    (f"{V1}.per_item_ms", 3, "variant[1].base_ms: is missing: per_item_ms comes on top of it"),
    ("worker", [], "worker: there must be at least one [[worker]]"),
    (f"{W0}.kind", "gpu", "worker[1].kind: gpu occurs twice"),
    (f"{W0}.kind", "c" * 41, "worker[0].kind: must be at most 40 letters"),
    (f"{W0}.devices", {}, "worker[0].devices: must name at least one device"),
    (f"{W0}.devices.cpu", 2.5, "worker[0].devices.cpu: must be a whole number"),
    (f"{W0}.resources.memory", 3, "worker[0].resources.memory: there is no such key; did you mean memory_gb?"),
    (f"{W0}.resources.memory_gb", 0, "worker[0].resources.memory_gb: must be above 0"),
    (f"{W0}.resources.cpu_cores", 4, "worker[0].resources.cpu_cores: says another number than devices.cpu"),
    (f"{W0}.max", 1, "worker[0].max: must be at least start (2), not 1"),
    (f"{W0}.min", 3, "worker[0].start: must be at least min (3), not 2"),
    ("load", [], "load: there must be at least one [[load]]"),
    (f"{L0}.app", "face", "load[0].app: there is no app 'face'; did you mean faces?"),
    (f"{L0}.app", ..., "load[0].app: must be there, or apps"),
    (f"{L0}.arrivals", "poison", "load[0].arrivals: there is no arrivals 'poison'; did you mean poisson?"),
    (f"{L0}.rate", ..., "load[0].rate: is missing"),
    (f"{L0}.rate", -4, "load[0].rate: must be at least 0 and at most 1e+07, not -4"),
    (f"{L0}.rate", [], "load[0].rate: must have at least one point"),
    (f"{L0}.rate", [[0, 4], [5]], "load[0].rate[1]: must be [second, queries/s], not [5]"),
    (f"{L0}.rate", [[0, 4], [60, 4], [61, -4]], "load[0].rate[2][1]: must be at least 0 and at most 1e+07, not -4"),
    (f"{L0}.rate", [[0, 4], [60, 4], [59, 8]], "load[0].rate[2][0]: must not be before the point before it (60 s), as 59 is"),
    (f"{L0}.cv", 2, "load[0].cv: means nothing with arrivals 'poisson'"),
    (f"{L0}.items", 0, "load[0].items: must be at least 1"),
    (f"{L0}.shares", "zipf", "load[0].shares: needs apps"),
    ("load.1", {"app": "faces", "arrivals": "gamma", "rate": 4}, "load[1].cv: is missing"),
    ("load.1", {"app": "faces", "arrivals": "gamma", "rate": 4, "cv": 0}, "load[1].cv: must be above 0"),
    ("load.1", {"app": "faces", "arrivals": "trace", "file": "no.txt"}, "load[1].file: cannot read the trace"),
    ("load.1", {"app": "faces", "arrivals": "trace", "file": "empty.txt"}, "load[1].file: the trace"),
    ("load.1", {"app": "faces", "arrivals": "times", "file": "."}, "load[1].file: cannot read the trace"),
    ("load.1", {"app": "faces", "arrivals": "times", "file": "a\0b"}, "load[1].file: must be some printable text"),
    ("load.1", {"app": "faces", "arrivals": "mmpp", "rates": [1, 2], "dwell_s": [1]}, "load[1].dwell_s: must have one"),
    ("load.1", {"apps": ["faces", "faces"], "rate": 1}, "load[1].apps: names an app twice"),
    ("load.1", {"apps": [], "rate": 1}, "load[1].apps: must name at least one app"),
    ("load.1", {"apps": ["faces", "cars"], "rate": 1, "shares": [0.8, 0.1]}, "load[1].shares: must add up to 1, not 0.9"),
    ("load.1", {"apps": ["faces", "cars"], "rate": 1, "shares": [1]}, "load[1].shares: must have one entry for each"),
    ("load.1", {"apps": ["faces", "cars"], "rate": 1, "shares": "even"}, 'load[1].shares: must be "zipf"'),
    ("load.1", {"apps": ["faces", "cars"], "rate": 1, "shares": {"zip": 1}}, "load[1].shares.zip: there is no such key"),
    ("load.1", {"apps": ["faces", "cars"], "rate": 1, "accuracy": 0.7}, "load[1].latency_ms: is missing: where a load has"),
    ("baseline", {"boats": {"variant": "A"}}, "baseline.boats: there is no app 'boats'"),
    ("baseline", {"cars": {"variant": "A"}}, "baseline.cars.variant: there is no variant of cars 'A'"),
    ("baseline", {"faces": {"variant": "A", "instances": 0}}, "baseline.faces.instances: must be at least 1"),
    (P0, {"base": "static"}, "policy[0].name: is missing"),
    (P0, {"name": "mine"}, "policy[0].base: is missing"),
    (P0, {"name": "mine", "base": "statik"}, "policy[0].base: there is no policy 'statik'; did you mean static?"),
    (P0, {"name": "mine", "base": "static", "hardware": ["tpu"]}, "policy[0].hardware[0]: there is no kind of device"),
    (P0, {"name": "mine", "base": "static", "hardware": []}, "policy[0].hardware: must name at least one"),
    (P0, {"name": "mine", "base": "static", "start": {"tpu": 1}}, "policy[0].start.tpu: there is no kind of [[worker]]"),
    (P0, {"name": "mine", "base": "infaas", "max": {"cpu": 1}}, "policy[0].max.cpu: must be at least what runs"),
    (P0, {"name": "mine", "base": "infaas", "min": {"cpu": 3}}, "policy[0].min.cpu: must be at most what runs"),
    (P0, {"name": "mine", "base": "infaas", "choice": {"cars": {"variant": "B"}}}, "policy[0].choice: means nothing"),
    (
        P0,
        {"name": "mine", "base": "static", "hardware": ["cpu"], "choice": {"cars": {"variant": "B"}}},
        "policy[0].choice.cars.variant: B runs on gpu, which this policy's hardware leaves out",
    ),
    (P0, {"name": "mine", "base": "static", "settings": {"autoscaler": {"slack": 0}}}, "policy[0].settings.autoscaler.s"),
    ("settings", {"autoscaler": {"hold": 5}}, "settings.autoscaler.hold: there is no such key; did you mean hold_s"),
    ("settings", {"autoscaler": {"hold_s": -5}}, "settings.autoscaler.hold_s: must be at least 0"),
    ("settings", {"goal": "accuracy"}, "settings.goal: belongs in [scenario], as objective"),
    ("settings", {"autoscaler": {"policy": "off"}}, "settings.autoscaler.policy: belongs in the settings of a single"),
    ("settings", {"dispatcher": {"policy": "random"}}, "settings.dispatcher.policy: belongs in the settings of a single"),
    (P0, {"name": "mine", "base": "infaas", "settings": {"goal": "speed"}}, "policy[0].settings.goal: there is no goal 'speed'; there are accuracy, cost"),
    ("settings", {"monitor": {"least_items": 10**400}}, "settings.monitor.least_items: must be at least 1 and at most"),
    ("settings", {"bus": {"url": "x"}}, "settings.bus: has no meaning in a scenario"),
    ("settings", {"machines": {"kinds": {}}}, "settings.machines.kinds: belongs in [[worker]] blocks"),
    ("job.0", {"app": "faces", "at_s": 0}, "job[0].inputs: is missing"),
    ("job.0", {"app": "faces", "at_s": 61, "inputs": 5}, "job[0].at_s: must be at least 0 and at most 60"),
    ("job.0", {"app": "faces", "inputs": 5, "model": "bert"}, "job[0].model: there is no model of this app 'bert'"),
    ("job.0", {"app": "faces", "inputs": 5, "variant": "C"}, "job[0].variant: there is no variant of this app 'C'"),
    ("fault.0", {"kind": "worker-die", "at_s": 1}, "fault[0].kind: there is no kind of fault 'worker-die'; did you mean"),
    ("fault.0", {"kind": "worker-dies"}, "fault[0].at_s: is missing"),
    ("fault.0", {"kind": "worker-dies", "at_s": 1, "until_s": 5}, "fault[0].until_s: means nothing for worker-dies"),
    ("fault.0", {"kind": "device-slow", "at_s": 1}, "fault[0].factor: is missing"),
    ("fault.0", {"kind": "device-slow", "at_s": 1, "factor": 0}, "fault[0].factor: must be above 0"),
    ("fault.0", {"kind": "load-fails", "at_s": 9, "until_s": 3}, "fault[0].until_s: must be after at_s (9), not 3"),
    ("fault.0", {"kind": "load-fails", "at_s": 9, "variant": "C"}, "fault[0].variant: there is no variant 'C'"),
    ("fault.0", {"kind": "model-errs", "at_s": 9, "model": "resnet50"}, "fault[0].kind: needs an [[app]] with `selection`"),
    ("fault.0", {"kind": "load-fails", "at_s": 9, "factor": 2}, "fault[0].factor: means nothing for load-fails"),
    ("fault.0", {"kind": "worker-dies", "at_s": 9, "worker": "tpu-0"}, "fault[0].worker: no worker is ever called"),
    ("fault.0", {"kind": "device-slow", "at_s": 9, "factor": 2, "worker": "cpu-99"}, "fault[0].worker: no worker is ever called cpu-99: there are cpu-0"),
    ("fault.0", {"kind": "worker-dies", "at_s": 9, "worker": "cpu-00"}, "fault[0].worker: no worker is ever called"),
    ("fault.0", {"kind": "worker-dies", "at_s": 9, "worker": "cpu-0-1"}, "fault[0].worker: no worker is ever called"),
    ("fault.0", {"kind": "messages-delayed", "at_s": 9}, "fault[0].delay_s: is missing"),
    ("fault.0", {"kind": "link-clogged", "at_s": 1}, "fault[0].process: is missing"),
    ("fault.0", {"kind": "link-clogged", "at_s": 1, "process": "d-0", "direction": "up"}, "fault[0].direction: there is no direction 'up'"),
    ("fault.0", {"kind": "process-stopped", "at_s": 1, "process": "d-7"}, "fault[0].process: no process is ever called 'd-7': there are clients, d-0"),
    ("fault.0", {"kind": "process-dies", "at_s": 1, "process": "clients"}, "fault[0].process: only the links of clients fail"),
    ("fault.0", {"kind": "process-dies", "at_s": 1, "process": "monitor-tpu-0"}, "fault[0].process: no process is ever called"),
    ("fault.0", {"kind": "process-dies", "at_s": 1, "process": "d-0", "until_s": 3}, "fault[0].until_s: means nothing for process-dies"),
    ("fault.0", {"kind": "worker-joins", "at_s": 1}, "fault[0].hardware: is missing"),
    ("fault.0", {"kind": "worker-joins", "at_s": 1, "hardware": "tpu"}, "fault[0].hardware: there is no kind of [[worker]] 'tpu'"),
    ("fault.0", {"kind": "boot-never", "at_s": 1}, "fault[0].hardware: is missing"),
    ("fault.0", {"kind": "clock-off", "at_s": 1, "worker": "cpu-0"}, "fault[0].delay_s: is missing"),
    ("fault.0", {"kind": "clock-off", "at_s": 1, "delay_s": 5}, "fault[0].worker: is missing"),
    ("fault.0", {"kind": "watch-late", "at_s": 1, "process": "d-0", "delay_s": -1}, "fault[0].delay_s: must be at least 0"),
    ("fault.0", {"kind": "lease-late", "at_s": 1, "process": "d-0"}, "fault[0].process: must be a VM-autoscaler, vm-0 or vm-1"),
    ("fault.0", {"kind": "query-resent", "at_s": 1, "delay_s": 1, "app": "cats"}, "fault[0].app: there is no app 'cats'"),
    ("fault.0", {"kind": "change", "at_s": 1}, "fault[0].what: is missing"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": ""}, "fault[0].what: there is no change ''"),
    ("fault.0", {"kind": "process-dies", "at_s": 1, "process": ""}, "fault[0].process: no process is ever called ''"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": "plans"}, "fault[0].what: there is no change 'plans'; did you mean plan"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": "target", "app": "cars"}, "fault[0].factor: is missing"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": "target", "app": "cars", "factor": 2}, "fault[0].factor: must be above 0 and at most 0.999"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": "app-deleted", "app": "cars", "factor": 2}, "fault[0].factor: means nothing for app-deleted"),
    ("fault.0", {"kind": "change", "at_s": 1, "what": "model-deleted", "model": "vgg"}, "fault[0].model: there is no model 'vgg'"),
    ("interference", {"tpu": 1.0}, "interference.tpu: there is no kind of device 'tpu'"),
    ("interference", {"gpu": -1.0}, "interference.gpu: must be at least 0"),
    ("cost", {"meter": "memory"}, "cost.per_gb_s: has no price for cpu, gpu"),
    ("cost", {"meter": "disk"}, "cost.meter: there is no meter 'disk'"),
    ("cost", {"per_gb_s": {"cpu": 1}}, 'cost.per_gb_s: means nothing with meter "worker"'),
]  # fmt: skip


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    wrong = changed(("scenario.seed", -1), ("load.1", {"app": "faces", "rate": "x", "burst": 2}))
    with pytest.raises(TomlError) as refused:
        read(tmp_path, wrong)
    assert {at.key for at, _ in refused.value.wrong} == {"scenario.seed", "load[1].rate", "load[1].burst"}


@pytest.mark.parametrize(("path", "value", "told"), BAD, ids=[f"{i}-{path}" for i, (path, _, _) in enumerate(BAD)])
def test_a_bad_value_is_refused_by_file_and_key(tmp_path, path, value, told):
    (tmp_path / "empty.txt").write_text("# nothing\n")
    if path.startswith(("policy", "job", "fault")):
        tree = changed((path.partition(".")[0], []), (path, value))
    else:
        tree = changed((path, value))
    with pytest.raises(TomlError) as refused:
        read(tmp_path, tree)
    assert str(refused.value).startswith(f"{tmp_path / 's.toml'}: {told}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[scenario\n", r"is not valid TOML: .*line 1"),
        (b"[scenario]\nduration_s = 1\nduration_s = 2\n", r"is not valid TOML: this is there twice: .*line 3"),
        (b"[scenario]\nduration_s = 1\n[scenario]\n", r"is not valid TOML: this is there twice: .*line 3"),
        (b"\xff\xfe", "is not valid TOML: byte 0 is not UTF-8 text"),
        (b"a = " + b"[" * 100_000, "is not valid TOML: it is nested too deeply"),
        (b"seed = " + b"9" * 10_000, "cannot be read: "),
        (b"", "scenario: is missing"),
        (b"#" * (8 * 2**20 + 1), "is larger than 8 MiB"),
    ],
)
def test_what_is_no_toml_is_refused_with_its_line(tmp_path, content, told):
    file = tmp_path / "s.toml"
    file.write_bytes(content)
    with pytest.raises(TomlError, match=f"^{re.escape(str(file))}: {told}"):
        read_scenario(file)


@pytest.mark.parametrize("name", ["no.toml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(TomlError, match="cannot be read"):
        read_scenario(tmp_path / name)


def test_unknown_policies_and_numbers_that_are_no_floats_are_refused(tmp_path) -> None:
    with pytest.raises(TomlError, match=r"policies\[1\]: there is no policy 'clippers'; did you mean clipper\+"):
        read(tmp_path, changed(), policies=["infaas", "clippers"])
    tree = deepcopy(FULL)
    tree["load"][0]["latency_ms"] = 10**5000
    with pytest.raises(TomlError, match=r"load\[0\].latency_ms: must be at most 1e\+12, not that"):
        derive(tree, tmp_path / "s.toml")


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=8) | st.dates()
    | st.sampled_from(["cpu", "gpu", "faces", "A", "infaas", "zipf", "trace", "a:b", "/dev/null", "..", "é"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.sampled_from(["cpu", "1", "name", "app", "variant", "hold_s"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FULL = changed(
    ("baseline", {"faces": {"variant": "A", "instances": 2}}),
    ("policy", [{"name": "p", "base": "static", "hardware": ["cpu"], "start": {"cpu": 1}, "max": {}, "min": {}}]),
    ("policy.0.choice", {"faces": {"variant": "A"}}),
    ("policy.0.settings", {"autoscaler": {"hold_s": 5}}),
    ("settings", {"monitor": {"least_items": 3}, "prices": {"per_hour": {"cpu": 1.0}}}),
    ("job", [{"app": "faces", "at_s": 1, "inputs": 3, "model": "resnet50"}]),
    ("fault", [{"kind": "device-slow", "at_s": 1, "until_s": 2, "hardware": "cpu", "factor": 2, "worker": "cpu-0"}]),
    ("interference", {"gpu": 1}),
    ("cost", {"meter": "memory", "per_gb_s": {"cpu": 1, "gpu": 2}}),
    ("load.2", {"apps": ["faces", "cars"], "shares": {"zipf": 1}, "arrivals": "mmpp", "rates": [1, 2], "dwell_s": [1, 2]}),
)  # fmt: skip


def places(tree, above=()):
    """Paths of everything in it."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, str(key))
        if isinstance(value, dict | list):
            yield from places(value, (*above, str(key)))


def test_the_full_one_is_sound(tmp_path):
    assert isinstance(derive(FULL, tmp_path / "s.toml"), Scenario)
    assert isinstance(derive(SOUND, tmp_path / "s.toml"), Scenario)


@given(path=st.sampled_from(sorted(places(FULL))), value=GARBAGE)
@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_anywhere_is_refused_or_understood(tmp_path, path, value):
    tree = deepcopy(FULL)
    at = tree
    for key in path[:-1]:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(path[-1]) if isinstance(at, list) else path[-1]] = value
    try:
        found = derive(tree, tmp_path / "s.toml")
    except TomlError as error:
        assert str(error).startswith(str(tmp_path / "s.toml") + ": ")
    else:
        assert isinstance(found, Scenario)
