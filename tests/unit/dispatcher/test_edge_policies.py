"""Users' policies in processes of their own: what they are given, what they give, and how each of their faults ends."""

import asyncio
import os
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from bus.codec import encode
from bus.messages.public import Requirements
from bus.tensors import from_array
from services.core.ensemble.base import Learnt, Member
from services.dispatcher import edge
from services.dispatcher.commands import RunPolicy
from services.dispatcher.edge import PolicyFailed, UserPolicies

MEMBERS = [Member(model=model, version="1", accuracy=0.9, labels=["no", "yes"]) for model in ("a", "b")]
OUTPUTS = {
    "a": {"scores": np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)},
    "b": {"scores": np.array([[0.5, 0.5], [0.4, 0.6]], np.float32)},
}
POLICIES = '''
    import os, sys, time
    import numpy as np

    class Counting:
        """Its state is a number: plain data needs no dump and load."""

        def init(self, members):
            return {"count": 0}

        def select(self, state, members, ask, u):
            if ask.context == "crash":
                os._exit(3)
            if ask.context == "hang":
                time.sleep(60)
            if ask.context == "print":
                print("not a frame")
            if ask.context == "raise":
                return members[u]
            if ask.context == "exit":
                sys.exit("enough")
            if ask.context == "memory":
                return [str(np.ones(2**28).sum())]
            if ask.context == "pid":
                return ["a", str(os.getpid())]
            if ask.context == "environment":
                ours = [name for name in os.environ if name.startswith("INFAAS")]
                return ["a", f"{len(ours) or 'none'} of {len(os.environ)}"]
            named = {"none": [], "text": "ab", "number": 3, "unknown": ["a", "zebra"], "twice": ["b", "b", "a"]}
            return named.get(ask.context, [member.model for member in members if u < 0.5])

        def combine(self, state, members, outputs):
            one = {"scores": sum(part["scores"].astype(float) for part in outputs.values()) / len(outputs)}
            agree = [len(outputs)] * 2
            return {
                1: lambda: (one, agree),
                2: lambda: ({"scores": one["scores"] * np.nan}, agree),
                3: lambda: ({"scores": one["scores"][:1]}, agree),
                4: lambda: ({"other": one["scores"]}, agree),
                5: lambda: (one, [3, 1]),
                6: lambda: (one, [1]),
                7: lambda: (one, [0.5, 1.0]),
                8: lambda: one,
                9: lambda: ({"scores": one["scores"].argmax(axis=1)}, agree),
                10: lambda: ({"scores": (one["scores"] > 0.5)}, agree),
            }[state.get("way", 1)]()

        def observe(self, state, members, label, outputs, p):
            assert outputs["a"]["scores"].shape == (1, 2), outputs
            return {"count": state["count"] + 1, "label": label, "p": p}

        def learnt(self, state, members):
            return state.get("rows") or [(member.model, 3.0, 0.5, state["count"]) for member in members]

    class Crashing(Counting):
        pass

    class Huge(Counting):
        def init(self, members):
            return {"count": 0, "notes": "x" * 100_000}

    class Bare:
        init = lambda self, members: None
        select = lambda self, state, members, ask, u: ["a"]
        combine = lambda self, state, members, outputs: (outputs["a"], [1, 1])
        observe = lambda self, state, members, label, outputs, p: state

    class Half:
        init = select = observe = lambda self, *rest: None

    class Demanding:
        def __init__(self, eta):
            pass
'''


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A folder with modules of policies, where Python finds them."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "test_own_policies.py").write_text(textwrap.dedent(POLICIES))
    (folder / "test_broken_policies.py").write_text("import no_such_module\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def run(runner, modules):
    """Calls a method of a policy. All tests use the same processes."""
    policies = UserPolicies(call_s=30.0)  # a busy machine is no hang

    def call(method, *args, policy="test_own_policies:Counting"):
        return runner.run(policies.run(RunPolicy(policy, method, args)))

    yield call
    policies.close()
    runner.run(asyncio.sleep(0.1))


def state(**fields) -> bytes:
    return encode({"count": 0} | fields)


def choose(run, what: str | None, policy: str = "test_own_policies:Counting"):
    return run("select", state(), MEMBERS, Requirements(context=what), 0.0, policy=policy)


def test_a_users_class_with_a_counter_is_asked_combined_and_taught(run) -> None:
    first = run("init", MEMBERS)
    assert run("select", first, MEMBERS, Requirements(), 0.25) == ["a", "b"]
    one = run("combine", first, MEMBERS, OUTPUTS)
    np.testing.assert_allclose(one.outputs["scores"], [[0.7, 0.3], [0.3, 0.7]])
    assert one.outputs["scores"].dtype == np.float32, "as the members' outputs"
    assert one.agree.tolist() == [2, 2]
    item = {"a": {"scores": OUTPUTS["a"]["scores"][:1]}}
    taught = run("observe", first, MEMBERS, "yes", item, {"a": 0.5})
    taught = run("observe", taught, MEMBERS, "yes", item, {"a": 0.5})
    assert run("learnt", taught, MEMBERS) == [Learnt("a", 0.5, 0.5, 2), Learnt("b", 0.5, 0.5, 2)]


def test_a_class_may_lack_methods_and_name_equals_and_print(run) -> None:
    bare = "test_own_policies:Bare"
    first = run("init", MEMBERS, policy=bare)
    assert run("learnt", first, MEMBERS, policy=bare) == [Learnt("a", 0.5, 1.0, 0), Learnt("b", 0.5, 1.0, 0)]
    assert (choose(run, "twice"), choose(run, "print")) == (["b", "a"], ["a", "b"])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("none", "select chose no member: a, b"),
        ("text", "select gave 'ab' and not a list of models"),
        ("number", "select gave 3 and not a list of models"),
        ("unknown", "select chose 'zebra', which is no member: a, b"),
        ("raise", r"select raised TypeError: list indices must be integers .* \(test_own_policies.py, line 19\)"),
        ("exit", "select raised SystemExit: enough"),
        ("memory", "select raised .*Unable to allocate 2.00 GiB"),
    ],
)
def test_a_bad_choice_is_refused_by_name_and_the_next_call_is_served(run, what: str, text: str) -> None:
    with pytest.raises(PolicyFailed, match=f"^policy 'test_own_policies:Counting': {text}"):
        choose(run, what)
    assert choose(run, None) == ["a", "b"]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (2, r"combine gave output 'scores' with values that are not numbers \(NaN\)"),
        (3, r"combine gave output 'scores' with shape \[1, 2\], but the members' is \[2, 2\]"),
        (4, "combine gave the outputs other, but the members' are scores"),
        (5, "combine must say of each of 2 items how many of 2 members agree"),
        (6, "combine must say of each of 2 items how many of 2 members agree"),
        (7, "combine must say of each item how many members agree, as a whole number"),
        (8, "combine gave no .outputs by name, agreeing members of each item"),
        (9, r"combine gave output 'scores' with shape \[2\]"),
        (10, "combine gave output 'scores' as bool, but the members' is float32"),
    ],
)
def test_a_bad_answer_is_refused_by_name(run, way: int, text: str) -> None:
    with pytest.raises(PolicyFailed, match=f"^policy 'test_own_policies:Counting': {text}"):
        run("combine", state(way=way), MEMBERS, OUTPUTS)


def test_numbers_and_states_that_do_not_fit_are_refused(run) -> None:
    theirs = {"a": {"count": np.array([1, 2], "i1")}}
    assert edge._output("count", from_array(np.array([3.0, 4.0])), theirs).dtype == np.int8
    with pytest.raises(
        edge._Unsound, match=r"gave output 'count' as int64, .* int8: .* 3 to 300, which do not fit INT8"
    ):
        edge._output("count", from_array(np.array([3, 300])), theirs)
    with pytest.raises(
        PolicyFailed, match="'test_own_policies:Huge': init gave a state of 100019 bytes: at most 65536"
    ):
        run("init", MEMBERS, policy="test_own_policies:Huge")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([("a", float("nan"), 1.0, 0)], "learnt gave a the weight nan: it must be a finite number, at least 0"),
        ([("a", -0.1, 1.0, 0)], "learnt gave a the weight -0.1"),
        ([("a", 1.0, 1.5, 0)], "learnt gave a the probability 1.5: it must be 0 to 1"),
        ([("a", 0.0, 1.0, 0)], "learnt gave weights that sum up to 0"),
        ([("zebra", 1.0, 1.0, 0)], "learnt chose 'zebra', which is no member"),
        ([("a", "much", 1.0, 0)], "learnt gave .* and not .member, weight, probability, n"),
        ([3], "learnt gave 3 and not"),
    ],
)
def test_bad_weights_are_refused_by_name(run, rows, text: str) -> None:
    with pytest.raises(PolicyFailed, match=f"^policy 'test_own_policies:Counting': {text}"):
        run("learnt", state(rows=rows), MEMBERS)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("no_such_module:Own", "policy 'no_such_module:Own' cannot be loaded: there is no module no_such_module; put"),
        ("test_broken_policies:Own", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("test_own_policies:Missing", "cannot be loaded: test_own_policies has no Missing; it has "),
        ("test_own_policies:Half", "cannot be loaded: it has no method `combine`: a policy needs init, select"),
        ("test_own_policies:Demanding", "cannot be loaded: TypeError: .*eta"),
        ("exp5", "policy 'exp5' is no module:Class"),
        (":", "policy ':' is no module:Class"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_loaded_is_named(run, policy: str, text: str) -> None:
    with pytest.raises(PolicyFailed, match=text):
        run("init", MEMBERS, policy=policy)
    with pytest.raises(PolicyFailed, match=r"is started again in|no module:Class"):
        run("init", MEMBERS, policy=policy)


def test_a_crash_is_told_and_the_process_comes_again_after_a_pause_that_grows(run) -> None:
    crashing = "test_own_policies:Crashing"
    pauses = []
    for _ in range(3):
        until_served(run, crashing)
        with pytest.raises(
            PolicyFailed, match=r"'test_own_policies:Crashing': its process ended with code 3 in select$"
        ):
            choose(run, "crash", crashing)
        with pytest.raises(PolicyFailed, match="with code 3 in select; it is started again in") as refused:
            choose(run, None, crashing)
        pauses.append(float(str(refused.value).split()[-2]))
    assert pauses[0] < pauses[1] < pauses[2]


def test_a_hang_ends_at_its_limit_and_other_policies_go_on(runner, modules) -> None:
    policies = UserPolicies(call_s=5.0)  # a machine that stands still for a moment is no hang
    own, other = "test_own_policies:Counting", "test_own_policies:Bare"

    def ask(policy: str, what: str | None):
        return policies.run(RunPolicy(policy, "select", (state(), MEMBERS, Requirements(context=what), 0.0)))

    async def test() -> None:
        await ask(own, None)
        await ask(other, None)
        began = time.monotonic()
        hanging = asyncio.ensure_future(ask(own, "hang"))
        behind = asyncio.ensure_future(ask(own, None))
        served = 0
        while not hanging.done():
            assert await ask(other, None) == ["a"]
            served += 1
        assert served > 5
        with pytest.raises(PolicyFailed, match="'test_own_policies:Counting': select took longer than 5 s"):
            await hanging
        with pytest.raises(PolicyFailed, match="select took longer than 5 s; it is started again in"):
            await behind
        assert 5.0 <= time.monotonic() - began < 55.0, "it hangs for 60 s"

    try:
        runner.run(test())
    finally:
        policies.close()


def test_a_caller_that_gives_up_takes_no_others_result(runner, modules) -> None:
    policies = UserPolicies(call_s=30.0)

    async def test() -> None:
        def ask(what: str | None):
            args = (state(), MEMBERS, Requirements(context=what), 0.0)
            return policies.run(RunPolicy("test_own_policies:Counting", "select", args))

        await ask(None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask("hang")
        assert await ask("twice") == ["b", "a"]

    try:
        runner.run(test())
    finally:
        policies.close()


def test_a_policy_gets_none_of_our_variables_and_no_process_is_left(runner, modules) -> None:
    policies = UserPolicies(call_s=30.0)

    def ask(what: str) -> str:
        args = (state(), MEMBERS, Requirements(context=what), 0.0)
        with pytest.raises(PolicyFailed, match="select chose ") as refused:
            runner.run(policies.run(RunPolicy("test_own_policies:Counting", "select", args)))
        return str(refused.value).split("'")[3]

    os.environ["INFAAS_TOKEN_OF_A_TEST"] = "secret"
    try:
        assert ask("environment").startswith("none of ")
        pid = int(ask("pid"))
        os.kill(pid, 0)
    finally:
        del os.environ["INFAAS_TOKEN_OF_A_TEST"]
        policies.close()
    give_up = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < give_up
        runner.run(asyncio.sleep(0.02))


def until_served(run, policy: str) -> None:
    give_up = time.monotonic() + 60.0
    while True:
        try:
            choose(run, None, policy)
        except PolicyFailed:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        else:
            return
