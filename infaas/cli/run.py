"""`infaas run SERVICE...`: single services, as the supervisor and the Swarm stack start them."""

import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import services
from bus.fields import meant
from infaas.cli.output import FAILED, Failure, one_line, usage

if TYPE_CHECKING:
    from services.core.settings import Settings


_OWN_PROCESS = ("dashboard", "engine-proxy", "worker")  # these share a process with no other service


def known() -> list[str]:
    """The names that `infaas run` takes."""
    from services.shell.runtime.serve import NESTED, package_of  # noqa: PLC0415

    names = {found.name for found in pkgutil.iter_modules(services.__path__) if found.ispkg} | NESTED.keys()
    found = [name for name in names if find_spec(f"{package_of(name)}.__main__") is not None]
    return sorted([*found, *_OWN_PROCESS])


def run(*service: str, config: Path | None = None, data_dir: Path | None = None) -> int:
    """Run one service, or several in one process, until SIGTERM or Ctrl-C.

    Example: `infaas run dispatcher`

    Parameters
    ----------
    service
        Names of services. Without a name, the error lists them all.
    config
        Settings file (TOML). Environment variables INFAAS_SECTION__FIELD override it.
    data_dir
        Data directory of the system to join, unless the settings name a NATS server.

    """
    if not service:
        usage(f"name at least one service: {', '.join(known())}")
    for name in service:
        if name not in known():
            usage(f"there is no service {name!r}: use one of {', '.join(known())}{meant(name, known())}")
    for name in _OWN_PROCESS:
        if name in service:
            if len(service) > 1:
                usage(f"{name} needs a process of its own: infaas run {name}")
            return _run_in_own_process(name, config, data_dir)
    from services.shell.runtime.serve import serve, together  # noqa: PLC0415  (after the names have been checked)

    wire, local = together(service), {"dispatcher", "executor"} <= {*service}
    return serve("+".join(service), settings_to_join(config, data_dir, os.environ), wire, local=local)


def _run_in_own_process(name: str, config: Path | None, data_dir: Path | None) -> int:
    if name == "dashboard":
        return run_dashboard(config, data_dir)
    if name == "worker":
        from services.shell.host.worker import serve as serve_worker  # noqa: PLC0415

        return serve_worker(settings_to_join(config, data_dir, os.environ), os.environ, config)
    from services.engine.proxy import serve  # noqa: PLC0415
    from services.shell.settings import SettingsError, load  # noqa: PLC0415

    try:
        settings = load(config)
    except SettingsError as error:
        usage(str(error))
    return serve(settings)


def run_dashboard(config: Path | None, data_dir: Path | None) -> int:
    """Serve the dashboard until SIGTERM or Ctrl-C.

    It reads the database of the setting store.reader_dsn. Without that, it finds the system as the commands do; the system may
    start later.
    """
    from bus.login import SystemAddress  # noqa: PLC0415
    from dashboard.serve import RESTS_S, CannotServe, ServeOptions, serve  # noqa: PLC0415
    from services.core.settings.fields import listed  # noqa: PLC0415
    from services.shell.http.server import inherited_socket, listen  # noqa: PLC0415
    from services.shell.runtime import telemetry  # noqa: PLC0415
    from services.shell.settings import SettingsError, load  # noqa: PLC0415

    if data_dir is not None:
        os.environ["INFAAS_DATA_DIR"] = str(data_dir)
    try:
        settings = load(config)
    except SettingsError as error:
        usage(str(error))
    telemetry.set_up(settings.log_level, "dashboard")
    section = settings.dashboard
    visited = inherited_socket()  # of whoever starts this process for a visitor, and again for the next one
    options = ServeOptions(
        rests_s=RESTS_S if visited else None,
        address=section.address,
        port=section.port,
        public_url=section.public_url,
        login=section.login,
        allow=listed(section.allow),
        metrics=(settings.metrics.host, settings.metrics.port)
        if settings.metrics.enabled and settings.metrics.port
        else None,
        tls_certificate=section.tls_certificate,
        tls_key=section.tls_key,
    )
    reader = settings.store.reader_dsn
    known = {"bus.monitoring": (settings.bus.monitoring, "")}
    system = SystemAddress(settings.bus.url, reader, settings.prefix, given=known) if reader else None
    try:
        return serve(options, system, lambda: visited or listen(section.address, section.port, of="dashboard"))
    except CannotServe as error:
        raise Failure(str(error)) from error


def settings_to_join(config: Path | None, data_dir: Path | None, environ: Mapping[str, str]) -> "Settings":
    """The settings. If they name no NATS server, the servers of the system that `infaas up` runs are put in."""
    from infaas.connecting import locate  # noqa: PLC0415
    from infaas.errors import NotConnected  # noqa: PLC0415
    from services.shell.settings import SettingsError, load  # noqa: PLC0415

    try:
        settings = load(config, environ)
        if settings.bus.url != type(settings.bus)().url:
            return settings
        system = locate(data_dir, environ)
        more = {"INFAAS_DATA_DIR": str(data_dir)} if data_dir else {}
        more |= {
            "INFAAS_BUS__URL": system.nats,
            "INFAAS_PREFIX": system.prefix,
            "INFAAS_BUS__TLS_CA": system.login.tls_ca,
        }
        if system.writer and not settings.store.dsn:
            more["INFAAS_STORE__DSN"] = system.writer
        return load(config, {**environ, **more})
    except SettingsError as error:
        usage(str(error))
    except NotConnected as error:
        raise Failure(str(error)) from error


def _prepare(service: Sequence[str]) -> None:
    """Import what the copies of a fork server share. Not onnxruntime: it starts a thread, and a copy without that thread hangs at its end."""
    from services.shell.runtime.serve import together  # noqa: PLC0415

    together(service[: service.index("--config")] if "--config" in service else service)
    for used in ("services.shell.objects", "services.shell.settings", "uvloop", "bus.natsbus", "infaas.connecting"):
        import_module(used)


def _main(arguments: list[str]) -> int:
    """`python -m infaas.cli.run SERVICE... [--config FILE]`: the supervisor starts services so, which saves loading the command line."""
    from bus.port import BusError  # noqa: PLC0415
    from services.shell.host.process import copied  # noqa: PLC0415

    names, _, config = " ".join(copied(arguments, _prepare)).partition(" --config ")
    try:
        return run(*names.split(), config=Path(config) if config else None)
    except Failure as failure:
        print(f"infaas: {one_line(failure)}", file=sys.stderr)
        return failure.code
    except BusError as error:
        print(f"infaas: {one_line(error)}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
