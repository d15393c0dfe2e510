"""The registration of a model over HTTP, for the dialects that offer it.

A file comes inline (`{"blob": base64}`) or from a host that the operator allowed (`{"URL": ...}`). It is on disk until the system has
taken it over. Two registrations run at a time: each has whole files in memory or on disk.
"""

import asyncio
import base64
import binascii
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from bus.fields import choice, fields_of
from bus.messages.public import Register, RegistrationStatus
from infaas.errors import BadInput
from infaas.registering import ENDINGS
from services.core.hosts import allowed_hosts
from services.core.settings import GatewaySettings, listed
from services.gateway.download import DownloadFailed, DownloadRules, NotAllowed, download
from services.gateway.edge import GatewayService
from services.gateway.errors import BadRequest, RequestFailed

MAX_REGISTRATIONS = 2  # at a time
MAX_LABELS = 64 * 1024  # bytes of a file of labels


class BadAllowedHosts(Exception):
    """The setting gateway.register_hosts has an entry that is not a host; the text names it."""


class FileSource(Struct, frozen=True, forbid_unknown_fields=True):
    """A file as a request gives it: one of both."""

    url: Annotated[str | None, "At a host that gateway.register_hosts names."] = msgspec.field(default=None, name="URL")
    blob: Annotated[str | None, "Its bytes as base64."] = None


MODEL_FILE = 'The model\'s file, which holds its weights: {"URL": "https://..."} or {"blob": base64}.'


def optional(*names: str) -> list[tuple[str, Any, Any]]:
    """Fields of a registration that a request may leave out, as `defstruct` takes fields."""
    known = [fields_of(Register)[name] for name in names]
    return [(one.name, Annotated[one.type | None, one.rule, one.meaning], None) for one in known]


_of_register: Any = msgspec.defstruct(
    "_of_register", optional("metric", "inputs_key", "labels_key", "task"), frozen=True, kw_only=True
)


class ModelFiles(_of_register, frozen=True, kw_only=True):  # type: ignore[misc, call-arg]  # made of the message's fields
    """What a request says of a model, beside its name and version. A text in place of a file is its URL."""

    validation: Annotated[
        str | FileSource,
        'An .npz file of numpy with at least 20 labelled items, as {"blob": base64} or {"URL": ...}: accuracy is measured on it, and no '
        "model is served unmeasured.",
    ]
    labels: Annotated[
        list[str] | FileSource | None, "Names of the classes: a list, or a text in UTF-8 with one a line."
    ] = None
    format: Annotated[
        str | None,
        choice(*dict.fromkeys(ENDINGS.values())),
        "Of the model's file. Default: as its URL's ending says, else onnx.",
    ] = None


class ModelRegistration:
    """Carries out registrations. Raises BadAllowedHosts."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._rules = download_rules(service.settings)
        self._slots = asyncio.Semaphore(MAX_REGISTRATIONS)

    async def register(
        self,
        app: str,
        model: str,
        version: str | None,
        files: ModelFiles,
        source: str | FileSource | None,
        at: str = "",
    ) -> RegistrationStatus:
        """Fetch the files, upload them, and wait until the model's variants are measured. Raises RequestFailed, InfaasError.

        app: `_` for none. source: the model's file. at: of the model in the request, for errors.
        """
        given = {name: value for name, value in msgspec.structs.asdict(files).items() if value is not None}
        async with self._slots:
            with TemporaryDirectory(prefix="infaas-gateway-") as directory:
                there = Path(directory)
                await self._put(source, f"{at}model", there / "model")
                await self._put(files.validation, f"{at}validation", there / "validation.npz")
                more = {name: given[name] for name in given if name in Register.__struct_fields__} | {
                    "app": app,
                    "model": model,
                    "version": version,
                    "validation": there / "validation.npz",
                    "format": files.format or _format(source),
                    "labels": await self._labels(files.labels, f"{at}labels", there / "labels.txt"),
                }
                try:
                    return await self._service.client.register(there / "model", **more)
                except BadInput as error:  # the directory is ours to know
                    raise BadRequest(f"{at}{str(error).replace(f'{there}/', '')}") from error

    async def _labels(self, given: list[str] | FileSource | None, at: str, path: Path) -> list[str]:
        if not isinstance(given, FileSource):
            return given or []
        await self._put(given, at, path, MAX_LABELS)
        try:
            text = await asyncio.to_thread(path.read_text, "utf-8")
            return [line.strip() for line in text.splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise BadRequest(f"{at}: must be a text in UTF-8, one label a line") from error

    async def _put(self, given: str | FileSource | None, at: str, path: Path, most: int | None = None) -> None:
        part = given if isinstance(given, FileSource) else FileSource(url=given)
        if (part.url is None) == (part.blob is None):
            raise BadRequest(f'{at}: give {{"URL": "https://..."}} or {{"blob": "base64"}}')
        rules = self._rules if most is None else self._rules._replace(max_bytes=most)
        if part.blob is not None:
            data = await asyncio.to_thread(decoded, part.blob, at)
            if len(data) > rules.max_bytes:
                raise RequestFailed(None, f"{at}: is larger than {rules.max_bytes} bytes", code="too_large")
            await asyncio.to_thread(path.write_bytes, data)
            return
        try:
            await asyncio.to_thread(download, part.url or "", path, rules)
        except NotAllowed as error:
            raise RequestFailed(
                None, f"{at}: {error}", code="forbidden" if error.forbidden else "bad_request"
            ) from error
        except DownloadFailed as error:
            code = "too_large" if error.status == 413 else "unavailable"
            raise RequestFailed(error.status, f"{at}: {error}", code=code) from error


def download_rules(settings: GatewaySettings) -> DownloadRules:
    """What the operator allows to fetch. Raises BadAllowedHosts."""
    try:
        return DownloadRules(allowed_hosts(listed(settings.register_hosts)), settings.register_max_bytes)
    except ValueError as error:
        raise BadAllowedHosts(f"gateway.register_hosts: {error}") from error


def decoded(blob: str, at: str) -> bytes:
    """The bytes of an inline file. Raises BadRequest."""
    try:
        return base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{at}.blob: must be the file's bytes as base64") from error


def _format(source: str | FileSource | None) -> str:
    """The format that the URL's ending says; ONNX where it says none."""
    url = source.url if isinstance(source, FileSource) else source
    try:
        suffix = Path(urlsplit(url or "").path).suffix.lower()
    except ValueError:
        suffix = ""
    return ENDINGS.get(suffix, "onnx")
