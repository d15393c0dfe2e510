"""`infaas run dashboard`: the web pages of a system."""

import os
from pathlib import Path

from infaas.cli.output import Failure, usage
from infaas.locate import Endpoints


def run_dashboard(config: Path | None, data_dir: Path | None) -> int:
    """Serve the dashboard until SIGTERM or Ctrl-C.

    It reads as store.reader_dsn says; where that is not set, as the commands find a system: there may be none yet.
    """
    from dashboard.serve import CannotServe, Options, serve  # noqa: PLC0415
    from services.shell.runtime import telemetry  # noqa: PLC0415
    from services.shell.settings import SettingsError, load  # noqa: PLC0415

    if data_dir is not None:
        os.environ["INFAAS_DATA_DIR"] = str(data_dir)
    try:
        settings = load(config)
    except SettingsError as error:
        usage(str(error))
    telemetry.set_up(settings.log_level, "dashboard")
    asked = settings.dashboard
    allow = asked.allow.replace(",", " ").split() if isinstance(asked.allow, str) else asked.allow
    options = Options(
        address=asked.address, port=asked.port, public_url=asked.public_url, login=asked.login, allow=tuple(allow)
    )
    reader = settings.store.reader_dsn
    system = Endpoints(settings.bus.url, reader, settings.prefix) if reader else None
    try:
        return serve(options, system)
    except CannotServe as error:
        raise Failure(str(error)) from error
