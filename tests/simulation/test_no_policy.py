"""Nothing is decided in services/simulation: it runs production's actors, and holds no copy of what they think.

What would break these tests: a class with `select`, `handle` or `solve`; a function taken over from a service; an order given to
a service; deciding code used anywhere but where actors are wired; another class than production's in the simulator.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from services.autoscaler.models.actor import ModelAutoscaler
from services.autoscaler.vms.actor import Controller
from services.core.selection.policy import BruteForce, InfaasPolicy, RoundRobin
from services.dispatcher.actor import Dispatcher
from services.dispatcher.metrics import SampledPolicy
from services.executor.actor import Executor
from services.jobs.actor import Coordinator
from services.jobs.runner.actor import Runner
from services.monitor.actor import MonitorActor
from tests.support.data.small_scenarios import SMALL, Told, load, scenario, settings

ROOT = Path(__file__).parents[2]
HERE = ROOT / "services" / "simulation"
SERVICES = ("core", "autoscaler", "dispatcher", "executor", "jobs", "monitor")

# Code (not data) of services that the simulator uses, and where. Anything else is a second opinion.
WIRING = {
    # The actors, and how production makes them from settings.
    "services.dispatcher.actor:make_dispatcher": {"system.py"},
    "services.executor.actor:make_executor": {"system.py"},
    "services.monitor.actor:make_monitor": {"system.py"},
    "services.autoscaler.models.actor:make_model_autoscaler": {"system.py"},
    "services.autoscaler.vms.actor:make_controller": {"system.py"},
    "services.jobs.actor:make_coordinator": {"system.py"},
    "services.jobs.runner.actor:make_runner": {"system.py"},
    "services.autoscaler.vms.edge:load_forecaster": {"system.py"},
    "services.shell.policies:load_policy": {"system.py"},
    "services.shell.policies:load_scaling": {"system.py"},
    "services.shell.policies:own_methods": {"scenario/policies.py"},  # which decisions a class makes
    "services.core.planning.fleet:LinearProgram": {"oracle.py"},  # a programme's rows and columns, whatever it is for
    "services.core.planning.fleet:solve_fleet": {"edges.py"},
    "services.dispatcher.metrics:SampledPolicy": {"system.py"},
    # What a scenario names is checked as an operator's verbs are.
    "services.core.batching:rule_errors": {"scenario/catalogue.py"},
    "services.core.ensemble.policies:make_policy": {"scenario/catalogue.py"},
    "services.core.pipelines.checks:pipeline_errors": {"scenario/pipelines.py", "replay/recording.py"},
    "services.core.pipelines.problem:problem_errors": {"scenario/pipelines.py"},
    # Which recorded edges can be replayed: a condition that nothing recorded, and records that are too large.
    "services.core.pipelines.graph:conditional": {"replay/recorded.py"},
    "services.core.pipelines.branching:oversized": {"replay/recorded.py"},
    # How often a query visits each stage, which the oracle's bound counts.
    "services.core.pipelines.graph:PipelineGraph": {"oracle.py"},
    "services.core.pipelines.branching:visits": {"oracle.py"},
    # A pipeline's plan is made before the run, as by an operator, and deployed as the registrar would.
    "services.core.pipelines.planners:plan_pipeline": {"scenario/planning.py"},
    "services.core.pipelines.checks:signature_of": {"scenario/planning.py"},
    "services.core.pipelines.graph:references": {"scenario/planning.py"},
    # What simulated devices are and answer, as the live ones.
    "services.core.emulation:zeros": {"edges.py", "clients.py"},
    "services.core.emulation:SharedSpeed": {"hardware.py"},
    "services.core.emulation:one_at_a_time": {"edges.py"},
    "services.core.emulation:with_tiers": {"scenario/catalogue.py"},
    # Names of keys in buckets.
    "services.core.batching:batching_key": {"scenario/catalogue.py", "faults.py"},
    "services.autoscaler.vms.commands:machine_key": {"edges.py"},
    "services.core.catalog:replicas_key": {"edges.py"},
    "services.core.placement:quarantine_key": {"edges.py"},
    # What must always hold is checked on the actors' state. A dead executor's supervisor knows what it computed.
    "services.dispatcher.actor:Dispatcher": {"fuzz/liveness.py"},
    "services.dispatcher.contexts:context_key": {"fuzz/liveness.py"},
    "services.dispatcher.contexts:read_value": {"fuzz/liveness.py"},
    "services.executor.actor:Executor": {"fuzz/liveness.py"},
    "services.autoscaler.vms.actor:Controller": {"fuzz/liveness.py"},
    "services.monitor.actor:MonitorActor": {"fuzz/trial.py"},
    "services.executor.queue:QueuedQuery": {"edges.py"},
    # The developer of a static system chooses before the run, by that system's own rule.
    "services.core.policy:chosen": {"scenario/baseline.py"},
    "services.core.planning.capacity:throughput": {"scenario/baseline.py"},
    "services.core.placement:misfit": {"scenario/baseline.py"},
    "services.core.placement:short_of": {"scenario/baseline.py"},
    "services.core.placement:total": {"scenario/baseline.py"},
    "services.core.placement:cores_needed": {"scenario/baseline.py"},
}
# what things cost, are called, look like, and how files are read
PLAIN = ("services.core.cost", "services.core.catalog", "services.core.actor", "services.core.toml")
DECIDES = {"select", "handle", "solve", "explain"}  # methods of policies, actors, solvers
ORDERS = ("bus.messages.flow", "bus.messages.fleet", "bus.messages.scaling")  # what services tell each other to do
FACTS = {"ExecutorExited", "Expectation"}  # what a supervisor says, which is no actor, and an operator of an app


def sources(folder: Path = HERE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """(module, name, name here) of everything taken from our own packages; name "" for a whole module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                yield node.module or "", alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name


def is_data(thing: Any) -> bool:
    """Structs, constants, names of types, errors, and protocols: nothing that could decide."""
    if isinstance(thing, ModuleType) or inspect.isroutine(thing):
        return False
    if inspect.isclass(thing):
        plain = issubclass(thing, (msgspec.Struct, Exception)) or getattr(thing, "_is_protocol", False)
        return plain or (issubclass(thing, tuple) and hasattr(thing, "_fields"))
    return True


def test_deciding_code_is_only_used_where_actors_are_wired() -> None:
    found: dict[str, set[str]] = {}
    for path in sources():
        for module, name, _ in imports(path):
            service = module.split(".")[1] if module.startswith("services.") else ""
            if service not in SERVICES or module.startswith(PLAIN):
                continue
            assert name, f"{path}: import names from {module}, so that it is seen which"
            owner = importlib.import_module(module)
            thing = getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
            if not is_data(thing):
                found.setdefault(f"{module}:{name}", set()).add(path.relative_to(HERE).as_posix())
    assert {what: where - WIRING.get(what, set()) for what, where in found.items()} == {what: set() for what in found}


def test_nothing_here_decides_descends_or_gives_orders() -> None:
    found = {
        (path.name, node.name)
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.lstrip("_") in DECIDES
    }
    assert found == set()
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                taken = {here: (module, name) for module, name, here in imports(path)}
                for base in node.bases:
                    module, name = taken.get(ast.unparse(base).partition("[")[0].partition(".")[0], ("", ""))
                    known = module.startswith("services.") and not module.startswith("services.simulation")
                    assert not known or is_data(getattr(importlib.import_module(module), name)), f"{path}: {node.name}"
    # Messages by which services make each other work are sent by services only.
    for path in sources():
        orders = {here for module, _, here in imports(path) if module.startswith(ORDERS)}
        made = {
            ast.unparse(node.func)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in orders
        }
        assert made <= FACTS, path
    ours = bodies(HERE)
    theirs = {what: where for service in SERVICES for what, where in bodies(ROOT / "services" / service).items()}
    assert len(ours) > 50
    assert len(theirs) > 500
    assert {ours[what]: theirs[what] for what in ours.keys() & theirs.keys()} == {}


def shape(body: list[ast.stmt]) -> tuple[Any, ...]:
    """What it does, whatever its variables are called."""
    numbers: dict[str, int] = {}
    found: list[Any] = []
    for statement in body:
        for node in ast.walk(statement):
            found.append(type(node))
            match node:
                case ast.Name(id=name) | ast.arg(arg=name):
                    found.append(numbers.setdefault(name, len(numbers)))
                case ast.Attribute(attr=name):
                    found.append(name)
                case ast.Constant(value=value):
                    found.append(repr(value))
    return tuple(found)


def bodies(folder: Path) -> dict[tuple[Any, ...], str]:
    """What each function of some size does, to where it stands."""
    found: dict[tuple[Any, ...], str] = {}
    for path in sources(folder):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                what = shape(node.body[(ast.get_docstring(node, clean=False) is not None) :])
                if len(what) >= 50:
                    found[what] = f"{path.relative_to(ROOT)}: {node.name}"
    return found


ACTORS = {Dispatcher, Executor, MonitorActor, ModelAutoscaler, Controller, Coordinator, Runner}


def test_the_actors_on_the_stage_are_productions_own() -> None:
    run = Told(SMALL["jobs"]())
    run.system.build()
    run.kernel.run(run.kernel.now + 2.0)
    members = run.kernel.members.values()
    assert {type(member.actor) for member in members} == ACTORS
    for member in members:
        assert member.handle.__self__ is member.actor
        assert member.handle.__func__ is type(member.actor).handle


@pytest.mark.parametrize(
    ("name", "policy"), [("infaas", InfaasPolicy), ("round-robin", RoundRobin), ("brute-force", BruteForce)]
)
def test_the_policy_is_productions_own(name: str, policy: type) -> None:
    run = Told(scenario(load((0.0, 1.0)), duration_s=1.0, policy=settings(dispatcher={"policy": name})))
    run.system.build()
    timed = run.kernel.members["d-0"].actor._policy
    assert type(timed) is SampledPolicy
    assert type(timed._select.__self__) is policy
    assert timed._select.__func__ is policy.select


def test_the_goal_reaches_the_dispatchers() -> None:
    goals = ("cost", "accuracy")
    runs = [Told(scenario(load((0.0, 1.0)), duration_s=1.0, policy=settings(goal=goal))) for goal in goals]
    for run in runs:
        run.system.build()
    assert tuple(run.kernel.members["d-0"].actor.view._goal for run in runs) == goals
