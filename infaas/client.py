"""The asyncio client: query by requirements instead of model names, list, explain, register, run offline jobs.

    async with infaas.connect() as client:
        answer = await client.query("digits", images, latency_ms=20, accuracy=0.95)
        answer.output, answer.variant, answer.cost

Each query is answered or refused once and charged once, even if a service crashes meanwhile. If no reply comes, the client sends the
query again with the same `retry_key`. It takes the first reply.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import msgspec

from bus.fields import meant
from bus.messages.catalog import TensorSpec
from bus.messages.jobs import JobStatus
from bus.messages.public import ObjectRef, RegistrationStatus, TensorView
from bus.port import Buffer, Bus, BusError, Forbidden, ObjectStore
from bus.subjects import Subjects
from infaas.answers import Answer, read_answer, read_map
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, RegistrationFailed, Timeout
from infaas.exchange import FIRST_SILENCE, Exchange, Settle
from infaas.inputs import opened
from infaas.queries import (
    GRACE,
    INPUTS,
    MAX_INLINE,
    Needs,
    Prepared,
    as_number,
    check_name,
    check_needs,
    check_seconds,
    encode,
    encode_inputs,
    head,
    head_before,
    input_parts,
    items_of,
    reply_within,
    trace_headers,
)
from infaas.tables import as_inputs, is_plain

if TYPE_CHECKING:
    from infaas.following import Jobs
    from infaas.following import OnProgress as OnJobProgress
    from infaas.registering import Arrays

FEEDBACK_TIMEOUT = 30.0  # s; a feedback may have its query evaluated again
_Filter = str | None  # of a list
LIST_TIMEOUT = 5.0  # s to wait for lists and explanations
INPUTS_AGE = 600.0  # s after which inputs left in the object store expire


class Client:
    """A connection to one system. `infaas.connect` makes it. Over a `Bus` of your own, call `await client.open()` first.

    Methods raise Refused (the system refused, with a reason), Timeout, NotConnected and BadInput. All of them are InfaasError.
    """

    def __init__(self, bus: Bus, *, prefix: str = "infaas", owns_bus: bool = False, files: Path | None = None) -> None:
        """files: the directory whose files the system's jobs read and write in place."""
        self.subjects = Subjects(prefix)
        self.bus = bus
        self._exchange = Exchange(bus, self.subjects)
        self._owns_bus = owns_bus
        self._inputs: ObjectStore | None = None
        self._files = files
        self._cleaning: set[asyncio.Task[None]] = set()

    async def open(self) -> Self:
        """Start listening for replies."""
        await self._exchange.open()
        return self

    async def close(self) -> None:
        """Fail all requests in flight with NotConnected, and disconnect. A second call does nothing."""
        self._exchange.check_loop()
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=GRACE)
        if self._owns_bus:
            self._exchange.close()
            await self.bus.close()
        else:
            await self._exchange.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def resent(self) -> int:
        """How many times this client has sent a request again."""
        return self._exchange.resent

    # -- queries

    @overload
    async def query(
        self,
        app: str | None,
        x: Any,
        *,
        timeout: float | None = None,
        raise_refused: Literal[True] = True,
        traceparent: str | None = None,
        **needs: Unpack[Needs],
    ) -> Answer: ...
    @overload
    async def query(
        self,
        app: str | None,
        x: Any,
        *,
        timeout: float | None = None,
        raise_refused: Literal[False],
        traceparent: str | None = None,
        **needs: Unpack[Needs],
    ) -> Answer | Refused: ...
    async def query(
        self,
        app: str | None,
        x: Any,
        *,
        timeout: float | None = None,
        raise_refused: bool = True,
        traceparent: str | None = None,
        **needs: Unpack[Needs],
    ) -> Answer | Refused:
        """Send one online query with all items of x (its first axis). The outputs keep the order of the items.

        app: the app to query; None: query a registered `model` without an app. x: what `register` took: an array, a nested list, a map of
        input names to these; a DataFrame, a Series, texts, rows (a list of maps) or columns (a map of lists), by the names of the app's
        columns; or a picture of Pillow, the bytes of its file, or its path, which is brought to the model's size, 0 to 1. needs: the requirements, all optional: latency_ms, accuracy (0..1, at least), or the app's own metric by its name (mae, f1_macro, ...), cost (US$ per 1,000 queries, at most),
        model, version, variant, context, priority (1 highest .. 9), deadline (Unix seconds), id (the answer returns it). timeout:
        seconds to wait; default: until the deadline, or 30 s. raise_refused=False returns the Refused instead of raising it.
        traceparent: W3C trace context of the caller; default: that of OpenTelemetry's current span, if the program has one. The
        system's own spans become children of it.
        """
        try:
            prepared = await self.prepare(app, x, timeout=timeout, **needs)
        except Refused as refused:
            if raise_refused:
                raise
            return refused
        try:
            return await self.ask(prepared, raise_refused=raise_refused, traceparent=traceparent)
        finally:
            if prepared.upload is not None:
                self._discard(prepared.upload)

    async def prepare(
        self, app: str | None, x: Any, *, timeout: float | None = None, **needs: Unpack[Needs]
    ) -> Prepared:
        """Encode a query that is sent many times. Large inputs go to the object store and stay there for 10 minutes.

        Arguments as for `query`. Raises BadInput, Refused (the app's name is invalid) and NotConnected.
        """
        wanted = check_needs(needs)
        subject = self.subjects.query("_" if app is None else check_name(app, "app"))
        timeout = reply_within(needs.get("deadline")) if timeout is None else check_seconds(timeout)
        fitted = await self._fitted(app, x, needs.get("model"))
        parts = input_parts(fitted)
        latency = as_number(needs.get("latency_ms"))
        if len(parts) == 1 and isinstance(parts[0], bytes):
            whole = Prepared(subject, head(wanted, parts[0]), timeout, latency)
        else:
            whole = Prepared(subject, head_before(wanted), timeout, latency, rest=[INPUTS, *parts])
        if len(whole.head) + sum(map(len, whole.rest)) <= min(MAX_INLINE, self.bus.max_payload) - 64:
            return whole
        reference = await self._upload(parts, items_of(fitted))
        return Prepared(subject, head({**wanted, "inputs_ref": reference}, None), timeout, latency, reference)

    @overload
    async def ask(
        self, prepared: Prepared, *, raise_refused: Literal[True] = True, traceparent: str | None = None
    ) -> Answer: ...
    @overload
    async def ask(
        self, prepared: Prepared, *, raise_refused: bool, traceparent: str | None = None
    ) -> Answer | Refused: ...
    async def ask(
        self, prepared: Prepared, *, raise_refused: bool = True, traceparent: str | None = None
    ) -> Answer | Refused:
        """Send a prepared query and wait for its answer or refusal. traceparent: as for `query`."""
        headers = trace_headers(traceparent)
        body, rest = prepared.body(), prepared.rest
        sent = time.monotonic()
        asked = self._exchange.ask(prepared.subject, body, prepared.timeout, headers=headers, tail=rest)
        reply = read_answer(await asked)
        if isinstance(reply, Refused):
            if raise_refused:
                raise reply
            return reply
        waited_ms = 1000 * (time.monotonic() - sent)
        if reply.outputs_ref is not None:
            reply = msgspec.structs.replace(reply, tensors=await self._download(reply.outputs_ref))
        # The system measures from the arrival that it knows of. A query that was sent again was first sent earlier.
        limit = prepared.latency_ms
        if limit is not None and waited_ms > max(limit, 1000 * FIRST_SILENCE) and "latency" not in reply.missed:
            reply = msgspec.structs.replace(reply, missed=[*reply.missed, "latency"])
        return reply

    def send(self, prepared: Prepared, settle: Settle) -> str:
        """Send a prepared query without waiting. `settle` gets the reply's bytes or an error, on the event loop. For load generators."""
        return self._exchange.send(prepared.subject, prepared.body(), prepared.timeout, settle, tail=prepared.rest)

    async def feedback(
        self,
        app: str,
        label: Any,
        *,
        query: str | None = None,
        id: str | None = None,
        inputs: Any = None,
        item: int = 0,
        context: str | None = None,
        retry_key: bytes | None = None,
    ) -> None:
        """Report the true label of an item of an earlier query. Returns once it is stored, and has taught the app's selection policy.

        query: the answer's `query`. id: the query's own id; the latest query that had it. inputs: those of the query; with them a
        feedback also counts when the query is not known any more. item: which item of the query. context: that of the query.
        retry_key: 16 bytes; what comes again with the same key counts once. Default: random ones for each call.
        """
        key = uuid.uuid4().bytes if retry_key is None else retry_key
        fields: dict[str, Any] = {"query": query, "id": id, "label": label, "context": context, "retry_key": key}
        if item:
            fields["item"] = item
        if inputs is not None:
            fields["inputs"] = msgspec.Raw(encode_inputs(await self._fitted(app, inputs, None)))
        await self._request(self.subjects.feedback(check_name(app, "app")), fields, timeout=FEEDBACK_TIMEOUT)

    async def feedbacks(self, app: str, items: Sequence[Mapping[str, Any]]) -> dict[int, Refused]:
        """Report up to 5,000 labels at once. items: maps with the arguments of `feedback`: `label`, and `query` or `id`; `inputs` cannot be given.

        What was accepted before may be sent again: it counts once. Returns those that were refused, by their places.
        """
        told = [{name: value for name, value in one.items() if value is not None} for one in items]
        subject = self.subjects.feedback(check_name(app, "app"))
        said = await self._request(subject, {"items": told}, timeout=FEEDBACK_TIMEOUT)
        return {one["item"]: Refused(**one["error"]) for one in said.get("refused", ())}

    # -- lists and explanations

    async def apps(self, *, app: str | None = None) -> list[dict[str, Any]]:
        """The registered applications and their linked models; none where there is no such app."""
        return await self._list("apps", app=app)

    async def models(self, *, app: str | None = None, model: str | None = None) -> list[dict[str, Any]]:
        """The registered models and versions. Raises Refused where there is no such app, as variants, releases and jobs do."""
        return await self._list("models", app=app, model=model)

    async def variants(
        self, *, app: _Filter = None, model: _Filter = None, version: _Filter = None, context: _Filter = None
    ) -> list[dict[str, Any]]:
        """The variants with their measured figures, which decisions use, also in one context. version: also one that does not serve."""
        return await self._list("variants", app=app, model=model, version=version, context=context)

    async def workers(self) -> list[dict[str, Any]]:
        """The workers with their devices and instances."""
        return await self._list("workers")

    async def pipelines(self, *, app: str | None = None) -> list[dict[str, Any]]:
        """The pipelines with their stages, and how each stage is served."""
        return await self._list("pipelines", app=app)

    async def releases(self, *, app: str | None = None) -> list[dict[str, Any]]:
        """The last release of each app, with its figures and what it waits for."""
        return await self._list("releases", app=app)

    async def jobs(self, *, app: str | None = None, model: str | None = None) -> list[dict[str, Any]]:
        """The offline jobs, newest first. Each has the fields of JobStatus."""
        return await self._list("jobs", app=app, model=model)

    async def selection(self, app: str, *, context: str | None = None) -> list[dict[str, Any]]:
        """What feedback has taught about an app's members, or in one context: `member`, `weight`, `probability`, `n`."""
        return await self._list("selection", app=app, context=context)

    async def explain(self, app: str, **needs: Unpack[Needs]) -> dict[str, Any]:
        """The decision that a query with these needs would get now: `chosen`, and `candidates`, each with its `why_not`."""
        return await self._request(self.subjects.explain(check_name(app, "app")), check_needs(needs))

    @overload
    async def register(
        self,
        model_file: str | Path,
        /,
        *,
        app: str,
        model: str | None = None,
        validation: "str | Path | Arrays",
        **options: Any,
    ) -> RegistrationStatus: ...
    @overload
    async def register(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        /,
        *,
        app: str,
        name: str | None = None,
        metric: str | None = None,
        **options: Any,
    ) -> dict[str, Any]: ...
    async def register(
        self, model_or_file: Any, x: Any = None, y: Any = None, /, *, app: str, **options: Any
    ) -> RegistrationStatus | dict[str, Any]:
        """Register a trained model with its labelled validation set. Waits until its variants are built and measured. Two shapes:

            await client.register(model, x, y, app="wine")
            await client.register("model.onnx", app="wine", model="forest", validation="validation.npz")

        The first takes a scikit-learn, XGBoost, LightGBM, torch, Keras or ONNX model, or a file, and converts it here. x, y: samples and their labels
        or targets, on which accuracy is measured; without y it is agreement with the model itself. name: of the model; default: the app's. metric: default: as labels and outputs tell.
        It returns what `infaas register --json` prints: the variants with their figures.

        The second takes a file as it is. model: its name; default: the app's. validation: an .npz file, or inputs and labels. It returns the last status, with the
        `variants`, and the `failures` of those that could not be built. With dry_run the model is inspected only, nothing is kept, and the
        result has what would be registered: `variants`, `signature`, and the `accuracy` of the model as it is.

        options: further ones of `infaas.registering.register`. Raises BadInput where a model cannot be converted, RegistrationFailed if none works.
        """
        from infaas import registering  # noqa: PLC0415  (a query needs none of it)

        if x is not None:
            registering.announce(self.bus, self.subjects, model_or_file, app)
            doors = self._register_file, self.variants
            return await registering.register_model(*doors, model_or_file, x, y, app=app, **options)
        if "validation" not in options:
            text = "samples and labels are missing; pass register(model, x, y, app=...), or validation= with a file"
            raise BadInput(f"x, y: {text}")
        return await self._register_file(model_or_file, app=app, **options)

    async def _register_file(self, model_file: str | Path, **options: Any) -> RegistrationStatus:
        from infaas.registering import register  # noqa: PLC0415

        status = await register(self.bus, self.subjects, model_file, **options)
        if status.state != "done":
            raise RegistrationFailed(status)
        return status

    async def cancel_registration(self, registration: str) -> None:
        """Stop a registration: nothing of it is kept; a failed one is dismissed. Raises Refused if it has ended otherwise or is unknown."""
        from infaas import registering  # noqa: PLC0415  (a query needs none of it)

        await registering.cancel(self.bus, self.subjects, check_name(registration, "registration"))

    async def admin(self, /, verb: str, **fields: Any) -> dict[str, Any]:
        """Send an operator's verb (`infaas.admin.<verb>`) with its fields, as `set-version` with app, model and version; None takes a setting back."""
        return await self._request(self.subjects.admin(check_name(verb, "verb")), fields, nulls=True)

    # -- offline jobs

    async def submit(
        self,
        app: str,
        input: Any,
        output: str | Path,
        *,
        accuracy: float | None = None,
        model: str | None = None,
        variant: str | None = None,
        job: str | None = None,
        measure: Mapping[str, Any] | None = None,
    ) -> str:
        """Submit an offline job: each item of `input` is computed once, and the outputs are written to `output` in the same order.

        input, output: URLs (file:// below a directory that the system allows, nats://bucket/key, s3://bucket/key) or paths of this
        machine. Files elsewhere than in the system's own directory `jobs` are uploaded, a .csv, .json or .npz file and pictures as `query`
        takes them, and `wait_job` or `save_output` brings the output, which ends in .npy, .jsonl or .msgpack. input may also be what `query` takes. accuracy: least accuracy, 0..1. model, variant: only this one. job: your own id
        for the job. measure: the app's own metric in place of accuracy, {"mae": 60}. Returns the job's id at once. Raises Refused, which names the wrong field.
        """
        app = check_name(app, "app")
        wishes = check_needs({"accuracy": accuracy, "model": model, "variant": variant, **(measure or {})})
        fitted = partial(self._fitted, app, model=model, always=True)
        return await self._jobs.submit(app, input, output, job, fitted, **wishes)

    async def save_output(self, job: str, path: str | Path) -> None:
        """Write the output of a job that is done to a file of this machine, if it is not there but in a bucket. Raises BadInput."""
        await self._jobs.save(await self.job(job), Path(path))

    async def job(self, job: str) -> JobStatus:
        """The last status of a job: `state`, `done` of `total` items, `cost`, and the `reason` if it failed."""
        return await self._jobs.status(check_name(job, "job"))

    async def wait_job(
        self, job: str, *, on_progress: "OnJobProgress | None" = None, timeout: float | None = None
    ) -> JobStatus:
        """Follow a job to its end. Returns its last status, even if it failed or was cancelled; see `state`.

        on_progress gets every status. timeout: seconds to wait; after that Timeout is raised, and the job continues. Of a job that this
        client has submitted, the output is where it was asked for.
        """
        return await self._jobs.wait(check_name(job, "job"), on_progress, timeout)

    async def cancel_job(self, job: str) -> None:
        """Stop a job and delete the output written so far. Raises Refused if the job has ended."""
        await self._jobs.cancel(check_name(job, "job"))

    # -- internals

    @cached_property
    def _jobs(self) -> "Jobs":
        from infaas.following import Jobs  # noqa: PLC0415  (a query needs none of it)

        return Jobs(self.bus, self.subjects, self._files)

    async def _fitted(self, app: str | None, x: Any, model: str | None, *, always: bool = False) -> Any:
        """Inputs as the app takes them, by the signature that the system tells of it. always: also arrays and lists. Raises BadInput."""
        if not always and is_plain(x):
            return x
        try:
            rows = await (self.models(model=model) if app is None else self.apps(app=app))
        except (Refused, Timeout):  # not every client may read lists; what does not fit is then refused
            rows = [{}]
        if app is not None and not rows:
            raise await self._no_app(app)
        return as_inputs(opened(x), msgspec.convert(rows[-1].get("inputs", []) if rows else [], list[TensorSpec]))

    async def _list(self, what: str, **about: str | None) -> list[dict[str, Any]]:
        items = (await self._request(self.subjects.list(what), about)).get("items")
        if not isinstance(items, list):
            raise InfaasError(f"the list of {what} has no items")
        app = about.get("app")
        if app is not None and not items and what not in ("apps", "pipelines") and not await self.apps(app=app):
            raise await self._no_app(app)
        return items

    async def _no_app(self, app: str) -> Refused:
        other = meant(app, [one["app"] for one in await self.apps()])
        return Refused("unknown_app", f"no app {app!r}: see infaas.list.apps{other}")

    async def _request(
        self, subject: str, fields: Mapping[str, Any], *, timeout: float = LIST_TIMEOUT, nulls: bool = False
    ) -> dict[str, Any]:
        """nulls: fields that are None are sent."""
        body = encode({name: value for name, value in fields.items() if nulls or value is not None}, "the request")
        return read_map(await self._exchange.ask(subject, body, timeout))

    async def _upload(self, inputs: Sequence[Buffer], items: int) -> ObjectRef:
        bucket, key = self.subjects.inputs_bucket, uuid.uuid4().hex
        try:
            self._inputs = self._inputs or await self.bus.object_store(bucket, max_age_s=INPUTS_AGE)
            await self._inputs.put(key, inputs)
        except Forbidden as error:
            text = "the credentials do not allow large inputs: send smaller ones, or use the gateway"
            raise Refused("forbidden", text) from error
        except BusError as error:
            size = sum(map(len, inputs))
            raise NotConnected(f"the inputs ({size:,} bytes) could not be uploaded: {error}") from error
        return ObjectRef(bucket, key, items=items)

    async def _download(self, reference: ObjectRef) -> dict[str, TensorView | list[Any]]:
        try:
            store = await self.bus.object_store(reference.bucket, create=False)
            outputs = msgspec.msgpack.decode(await store.get(reference.key), type=dict[str, TensorView | list[Any]])
        except (BusError, msgspec.DecodeError) as error:
            raise InfaasError(f"the outputs could not be fetched from the object store: {error}") from error
        self._discard(reference)
        return outputs

    def _discard(self, reference: ObjectRef) -> None:
        """Delete the object in the background. If that fails, the object expires by itself."""

        async def discard() -> None:
            with contextlib.suppress(BusError):
                await (await self.bus.object_store(reference.bucket, create=False)).delete(reference.key)

        task = asyncio.create_task(discard())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
