"""`infaas admin`: what is asked wrongly is said before anybody is asked."""

import pytest

from bus.fields import fields_of
from bus.messages.verbs import ADMIN_VERBS
from infaas.cli import main
from infaas.cli.admin import VERBS, admin


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explode"], ["explode", "set-version"]),
        (["set-version", "--app", "a"], ["set-version needs", "--model", "--version"]),
        (["add-app", "--app", "a", "--model", "m"], ["add-app takes no --model"]),
        (["set-replicas", "--app", "a", "--count", "1.5"], ["--count", "whole number"]),
        (["set-target", "--app", "a"], ["set-target needs", "--slo-target"]),
        (["set-target", "--app", "a", "--slo-target", "most"], ["--slo-target", "most"]),
        (["set-selection", "--policy", "exp4"], ["set-selection needs", "--app"]),
        (["set-selection", "digits", "--policy", "exp4", "--members"], ["--members needs a value"]),
        (["set-selection", "digits", "--eta", "much"], ["--eta", "much"]),
        (["set-target", "digits", "--slo-target", "0.9", "--contextual"], ["set-target takes no --contextual"]),
        (["set-batching", "--policy", "aimd"], ["set-batching needs", "--app", "--model", "--variant"]),
        (["set-batching", "--app", "a", "--model", "m"], ["exactly one"]),
        (["set-batching", "--app", "a", "--batch", "1.5"], ["--batch", "whole number"]),
        (["add-app", "a", "--no-latency-ms"], ["add-app takes no --no-latency-ms"]),
        (["set-app", "a", "--slo-target", "0.9", "--no-slo-target"], ["--no-slo-target", "one of both"]),
        ([], ["verb"]),
    ],
)
def test_bad_usage_exits_2_with_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    for word in words:
        assert word.lower() in told.err.lower()


def test_the_command_has_each_verb_that_options_can_say() -> None:
    assert {*ADMIN_VERBS} - {*VERBS} == {"set-pipeline", "deploy-pipeline"}, "of `infaas pipeline`"
    lines = (admin.__doc__ or "").splitlines()
    for verb, kind in VERBS.items():
        line = next(one for one in lines if one.strip().startswith(f"* {verb}: "))
        for field in fields_of(kind):
            assert f"`--{field.replace('_', '-')}`" in line
