"""Asking until there is an answer: a variant that is not loaded yet may be refused with a time to try again."""

import time
from collections.abc import Callable, Container
from typing import Any, TypeVar

from tritonclient.utils import InferenceServerException

from infaas.errors import Refused

T = TypeVar("T")
NOT_YET = ("unknown_app", "unknown_model", "deadline", "overloaded")


def insist(ask: Callable[[], T], later: Container[Any] = NOT_YET) -> T:
    """What Triton's client, or the client library, gets in the end. later: statuses, or codes, after which it asks again.

    Dispatchers hear of a new app a moment later, and a variant may have to be loaded.
    """
    give_up = time.monotonic() + 240
    while True:
        try:
            return ask()
        except (InferenceServerException, Refused) as error:
            said = error.code if isinstance(error, Refused) else error.status()
            if said not in later or time.monotonic() > give_up:
                raise
            time.sleep(0.1)
