"""`infaas doctor` on frameworks: what works, what does not and why, and what nobody has ever run."""

import pytest

from infaas.cli.machine_checks import NEVER_EXECUTED, check_backends
from services.executor.backends import NAMES, backend
from services.shell.host.accelerators import accelerators


@pytest.fixture(scope="module")
def findings():
    return {finding.check.removeprefix("backend "): finding for finding in check_backends()}


def test_every_backend_has_a_line_that_says_whether_it_was_ever_executed(findings) -> None:
    assert list(findings) == list(NAMES)
    assert findings["ort"].state == "ok"
    assert "cpu" in findings["ort"].detail
    for name, finding in findings.items():
        assert (NEVER_EXECUTED in finding.detail) == (not backend(name).executed)
        assert finding.detail.strip() != NEVER_EXECUTED
    kinds = {one.kind for one in accelerators()}
    for name, finding in findings.items():
        if backend(name).hardware not in {"cpu", *kinds}:
            assert finding.state == "skipped"
            assert any(word in finding.detail for word in ("driver", "tool", "executor.remote_hosts"))
