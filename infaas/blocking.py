"""The client without asyncio: a background thread runs the asyncio client, and each method waits for its result.

    with infaas.connect_blocking() as system:
        answer = system.query("digits", images, latency_ms=20)

Any number of threads may share one client. Their queries run concurrently.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from bus.messages.public import RegistrationStatus
from infaas.answers import Answer
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import BadInput, NotConnected, Refused
from infaas.queries import Needs

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]) -> "Callable[Concatenate[Infaas, P], T]":
    """The method of the asyncio client as a blocking one."""

    def call(self: "Infaas", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    update_wrapper(call, method)
    return call


class Infaas:
    """A blocking connection to one system. Arguments and errors as for `infaas.connect` and `infaas.Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        data_dir: str | Path | None = None,
        prefix: str | None = None,
        timeout: float = 5.0,
        **login: str | None,
    ) -> None:
        self._begin(connect(url, data_dir=data_dir, prefix=prefix, timeout=timeout, **login).open())

    def _begin(self, opening: Coroutine[Any, Any, Client]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="infaas-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = self._run(opening)
        except BaseException:
            self._stop()
            raise

    if TYPE_CHECKING:

        @overload
        def query(
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
        def query(
            self,
            app: str | None,
            x: Any,
            *,
            timeout: float | None = None,
            raise_refused: Literal[False],
            traceparent: str | None = None,
            **needs: Unpack[Needs],
        ) -> Answer | Refused: ...
        def query(self, *args: Any, **needs: Any) -> Any: ...

    else:
        query = _waiting(Client.query)
    feedback = _waiting(Client.feedback)
    feedbacks = _waiting(Client.feedbacks)
    apps = _waiting(Client.apps)
    models = _waiting(Client.models)
    variants = _waiting(Client.variants)
    workers = _waiting(Client.workers)
    pipelines = _waiting(Client.pipelines)
    releases = _waiting(Client.releases)
    selection = _waiting(Client.selection)
    explain = _waiting(Client.explain)
    admin = _waiting(Client.admin)
    register = _waiting(Client.register)
    cancel_registration = _waiting(Client.cancel_registration)
    submit = _waiting(Client.submit)
    jobs = _waiting(Client.jobs)
    job = _waiting(Client.job)
    wait_job = _waiting(Client.wait_job)
    cancel_job = _waiting(Client.cancel_job)
    save_output = _waiting(Client.save_output)

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if not self._closed:
            try:
                self._run(self._client.close())
            finally:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise NotConnected("this client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback cannot call the blocking client: call it from another thread")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C, no query is left in flight
            raise

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


connect_blocking = Infaas  # connects, and waits for the connection


def told() -> dict[str, Any]:
    """Options of a registration that say on stderr what was understood, and the progress."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    last = [""]

    def on_progress(status: RegistrationStatus) -> None:
        if status.step and status.step != last[0]:
            last[0] = status.step
            say(f"{100 * status.progress:3.0f} %  {status.step}")

    return {"on_progress": on_progress, "say": say}


def register(
    model: Any,
    x: Any,
    y: Any = None,
    app: str = "",
    *,
    name: str | None = None,
    metric: str | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Register a trained model with the system that the commands find, and return what `infaas register --json` prints.

        infaas.register(classifier, x_test, y_test, app="wine")

    Arguments as for `Client.register`; without y, accuracy is agreement with the model itself. What was understood, and the progress, go to stderr.
    """
    if not app:
        raise BadInput("app: name the app that the model serves: infaas.register(model, x, y, app='...')")
    with connect_blocking(data_dir=data_dir) as system:
        return system.register(model, x, y, app=app, name=name, metric=metric, **told() | options)
