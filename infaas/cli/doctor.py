"""`infaas doctor`: checks this machine and a system, and says what to do about what is wrong."""

import asyncio
import os
from pathlib import Path

from infaas.cli.findings import Finding
from infaas.cli.machine_checks import check_machine
from infaas.cli.options import DataDir, Json
from infaas.cli.output import FAILED, show
from infaas.cli.system_checks import check_system
from infaas.errors import NotConnected
from infaas.locate import DEFAULT_DATA_DIR, locate

_MARKS = {"ok": "ok     ", "failed": "FAILED ", "skipped": "skipped"}


def doctor(*, data_dir: DataDir = None, json: Json = False) -> int:
    """Check this machine and, if one is found, a system. Exits 1 when something failed; each failed line says what to do.

    Parameters
    ----------
    data_dir
        Directory of the `infaas up` system to check; else INFAAS_DATA_DIR, INFAAS_NATS_URL, ./.infaas, the default ports.
    json
        Print one JSON document.

    """
    findings = check_machine(data_dir or Path(os.environ.get("INFAAS_DATA_DIR") or DEFAULT_DATA_DIR))
    findings += _check_system(data_dir)
    failed = any(finding.state == "failed" for finding in findings)
    show({"ok": not failed, "checks": [finding.to_map() for finding in findings]}, json, _render)
    return FAILED if failed else 0


def _check_system(data_dir: Path | None) -> list[Finding]:
    named = data_dir or any(os.environ.get(f"INFAAS_{name}") for name in ("DATA_DIR", "NATS_URL", "SQL_DSN"))
    try:
        findings = asyncio.run(check_system(locate(data_dir)))
    except NotConnected as error:
        return [Finding("system", "failed", str(error), "infaas up")]
    if findings[0].state == "failed" and not named:
        return [Finding("system", "skipped", "no system runs here; `infaas up` starts one")]
    return findings


def _render(document: dict[str, list[dict[str, str]]]) -> None:
    for finding in document["checks"]:
        print(f"{_MARKS[finding['state']]}  {finding['check']:18} {finding['detail']}")
        if finding["state"] == "failed":
            print(f"{'':9}{'':18} -> {finding['remedy']}")
