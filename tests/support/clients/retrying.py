"""Asking until there is an answer: a variant that is not loaded yet may be refused with a time to try again."""

import time
from collections.abc import Callable, Container
from typing import Any, TypeVar

from tritonclient.utils import InferenceServerException

from infaas.errors import Refused

T = TypeVar("T")
NOT_YET = ("unknown_app", "unknown_model", "deadline", "overloaded")


def insist(ask: Callable[[], T], later: Container[Any]) -> T:
    """What Triton's client gets in the end. later: statuses after which it asks again."""
    give_up = time.monotonic() + 240
    while True:
        try:
            return ask()
        except InferenceServerException as error:
            if error.status() not in later or time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def answered(ask: Callable[[], T]) -> T:
    """What the client library gets in the end: dispatchers hear of a new app a moment later, and a variant may have to be loaded."""
    give_up = time.monotonic() + 240
    while True:
        try:
            return ask()
        except Refused as refused:
            if refused.code not in NOT_YET or time.monotonic() > give_up:
                raise
            time.sleep(0.1)
