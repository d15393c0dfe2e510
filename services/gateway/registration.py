"""The registration of a model over HTTP, for the dialects that offer it.

A file comes inline (`{"blob": base64}`) or from a host that the operator allowed (`{"URL": ...}`). It is on disk until the system has
taken it over. Two registrations run at a time: each has whole files in memory or on disk.
"""

import asyncio
import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bus.messages.public import RegistrationStatus
from infaas.errors import InfaasError, Refused, RegistrationFailed
from infaas.registering import ENDINGS
from services.core.hosts import allowed_hosts
from services.core.settings import GatewaySettings, listed
from services.gateway.download import DownloadFailed, DownloadRules, NotAllowed, download
from services.gateway.edge import GatewayService
from services.gateway.errors import RequestFailed, failure_of, without_subjects

MAX_REGISTRATIONS = 2  # at a time
MAX_LABELS = 64 * 1024  # bytes of a file of labels
VALIDATION_MISSING = (
    "validation is missing: an .npz file of numpy with at least 20 labelled items, as"
    ' {"blob": base64} or {"URL": ...}; accuracy is measured on it, and no model is served unmeasured'
)


class BadAllowedHosts(Exception):
    """The setting gateway.register_hosts has an entry that is not a host; the text names it."""


class FileSource(NamedTuple):
    """A file as a request gives it, by its URL or as base64. field: its name in the request, for errors."""

    field: str
    url: str | None = None
    blob: str | None = None


class RegistrationRequest(NamedTuple):
    """A model to register. app: `_` for none. more: further arguments of the client library's `register`."""

    app: str
    model: str
    source: FileSource
    validation: FileSource
    labels: FileSource | tuple[str, ...] = ()
    format: str | None = None
    more: Mapping[str, Any] = {}


def file_source(value: Any, field: str) -> FileSource:
    """The file that a field gives: `{"URL": ...}` or `{"blob": ...}`, in any case, or a URL alone. Raises RequestFailed."""
    if isinstance(value, str):
        return FileSource(field, url=value)
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, text)] = value.items()
        if isinstance(text, str) and name.lower() in ("url", "blob"):
            return FileSource(field, **{name.lower(): text})
    raise RequestFailed(None, f'{field}: give {{"URL": "https://..."}} or {{"blob": "base64"}}')


class ModelRegistration:
    """Carries out registrations. Raises BadAllowedHosts."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._rules = download_rules(service.settings)
        self._slots = asyncio.Semaphore(MAX_REGISTRATIONS)

    async def register(self, request: RegistrationRequest) -> RegistrationStatus:
        """Fetch the files, upload them, and wait until the model's variants are measured. Raises RequestFailed, Refused."""
        kind = request.format or _format(request.source)
        if kind not in ENDINGS.values():
            raise RequestFailed(None, f"format: must be one of {', '.join(dict.fromkeys(ENDINGS.values()))}")
        async with self._slots:
            with TemporaryDirectory(prefix="infaas-gateway-") as directory:
                model, validation = Path(directory) / "model", Path(directory) / "validation.npz"
                await self._put(request.source, model)
                await self._put(request.validation, validation)
                labels = await self._labels(request.labels, Path(directory) / "labels.txt")
                try:
                    return await self._service.client.register(
                        model,
                        app=request.app,
                        model=request.model,
                        validation=validation,
                        format=kind,
                        labels=labels,
                        **request.more,
                    )
                except Refused as refused:
                    raise without_subjects(refused) from None
                except RegistrationFailed as error:
                    raise RequestFailed(422, str(error), code="unsatisfiable") from error
                except InfaasError as error:
                    raise failure_of(error) from error

    async def _labels(self, given: FileSource | tuple[str, ...], path: Path) -> tuple[str, ...]:
        if not isinstance(given, FileSource):
            return given
        await self._put(given, path, MAX_LABELS)
        try:
            text = await asyncio.to_thread(path.read_text, "utf-8")
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        except UnicodeDecodeError as error:
            raise RequestFailed(None, "labels: must be a text in UTF-8, one label a line") from error

    async def _put(self, part: FileSource, path: Path, most: int | None = None) -> None:
        rules = self._rules if most is None else self._rules._replace(max_bytes=most)
        if part.blob is not None:
            data = await asyncio.to_thread(decoded, part)
            if len(data) > rules.max_bytes:
                raise RequestFailed(None, f"{part.field}: is larger than {rules.max_bytes} bytes", code="too_large")
            await asyncio.to_thread(path.write_bytes, data)
            return
        try:
            await asyncio.to_thread(download, part.url or "", path, rules)
        except NotAllowed as error:
            raise RequestFailed(
                None, f"{part.field}: {error}", code="forbidden" if error.forbidden else "bad_request"
            ) from error
        except DownloadFailed as error:
            code = "too_large" if error.status == 413 else "unavailable"
            raise RequestFailed(error.status, f"{part.field}: {error}", code=code) from error


def download_rules(settings: GatewaySettings) -> DownloadRules:
    """What the operator allows to fetch. Raises BadAllowedHosts."""
    try:
        return DownloadRules(allowed_hosts(listed(settings.register_hosts)), settings.register_max_bytes)
    except ValueError as error:
        raise BadAllowedHosts(f"gateway.register_hosts: {error}") from error


def decoded(part: FileSource) -> bytes:
    """The bytes of an inline file. Raises RequestFailed."""
    try:
        return base64.b64decode(part.blob or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestFailed(None, f"{part.field}.blob: must be base64: {error}") from error


def _format(source: FileSource) -> str:
    """The format that the URL's ending says; ONNX where it says none."""
    try:
        suffix = Path(urlsplit(source.url or "").path).suffix.lower()
    except ValueError:
        suffix = ""
    return ENDINGS.get(suffix, "onnx")
