"""`infaas doctor` on frameworks: what works, what does not and why, and what nobody has ever run."""

import pytest

from infaas.cli.machine_checks import NEVER_EXECUTED, check_backends
from services.executor.backends import NAMES, backend
from services.shell.host.accelerators import accelerators


@pytest.fixture(scope="module")
def findings():
    return {finding.check.removeprefix("backend "): finding for finding in check_backends()}


def test_every_backend_has_a_line(findings):
    assert list(findings) == list(NAMES)
    assert findings["ort"].state == "ok"
    assert "cpu" in findings["ort"].detail


def test_what_was_never_executed_says_so_whether_it_works_or_not(findings):
    for name, finding in findings.items():
        assert (NEVER_EXECUTED in finding.detail) == (not backend(name).executed)
        assert finding.detail.strip() != NEVER_EXECUTED


def test_a_missing_device_is_no_failure_and_has_its_reason(findings):
    kinds = {one.kind for one in accelerators()}
    for name, finding in findings.items():
        if backend(name).hardware not in {"cpu", *kinds}:
            assert finding.state == "skipped"
            assert any(word in finding.detail for word in ("driver", "tool", "executor.remote_hosts"))
