"""Dispatchers that get feedback, with predictions that a test makes up, on virtual time."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Ensemble
from bus.messages.public import ListRequest
from bus.subjects import Subjects
from services.core.actor import Synced
from services.core.ensemble.base import Learnt, Member
from services.core.selection.policy import InfaasPolicy
from services.core.settings import Settings
from services.dispatcher.actor import Dispatcher, make_dispatcher
from services.dispatcher.commands import RunPolicy, WriteContext
from services.dispatcher.predictions import Prediction, digest_of
from tests.support.data.events import change_of
from tests.support.simulated.fleet import ContextStore, catalogue, variant
from tests.support.simulated.virtual_time import Stage

RIGHT, WRONG = np.array([[0.9, 0.1]], np.float32), np.array([[0.1, 0.9]], np.float32)
MODELS = ("bad", "good")
MEMBERS = [Member(model=model, version="1", accuracy=0.9) for model in MODELS]
SELECTION = Ensemble(policy="exp4", contextual=True)
PLAIN = AppRecord(app="plain", links={})
INPUTS = [[1.0, 2.0]]
DURABLE = 0.5  # s after which all that was recorded is on disk


class Slow(ContextStore):
    """A bucket that takes its time, or is away. The write is there at once; only the word of it comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.001
        self.away = False
        self.writes = 0
        self.fails: set[str] = set()  # methods of the user's own policy
        self.dies_at: Callable[[int], None] = lambda writes: None  # called at each write that begins

    def __call__(self, command: Any) -> tuple[float, Any]:
        if self.away:
            return self.seconds, RuntimeError("nobody is there")
        if isinstance(command, RunPolicy):
            return 0.01, self.own(command)
        done = super().__call__(command)[1]
        if isinstance(command, WriteContext):
            self.writes += 1
            self.dies_at(self.writes)
        return self.seconds, done

    def own(self, command: RunPolicy) -> Any:
        """A user's own policy, which counts the feedbacks that it has observed."""
        if command.method in self.fails:
            return RuntimeError("my.votes:Own.observe raised ValueError: no")
        seen = int(command.args[0] or b"0")
        if command.method == "observe":
            return str(seen + 1).encode()
        return [Learnt(model, 0.5, 1.0, seen) for model in MODELS]


class Dispatchers:
    """Dispatchers with one store, apps "a" and "b" whose two models answer together, and "plain", which has no selection."""

    def __init__(self, count: int = 1, selection: Ensemble | None = SELECTION) -> None:
        self.stage = Stage()
        self.stage.listen("_INBOX.>")
        self.store = Slow()
        self.subjects = Subjects()
        both = [variant(f"{model}-1", model=model) for model in MODELS]
        *records, app = catalogue(*both, app="a")
        self.apps = [replace(app, app=name, selection=selection) for name in ("a", "b")]
        self.records = [*records, *self.apps, PLAIN]
        self.uids = itertools.count()
        self.replies = itertools.count()
        self.lives = itertools.count()
        for number in range(count):
            self.start(f"d{number}")

    def start(self, name: str) -> Dispatcher:
        new_uid = lambda: next(self.uids).to_bytes(16, "big")  # noqa: E731
        actor = make_dispatcher(Settings(), self.subjects, name, InfaasPolicy(), {"cpu": 1.0}, new_uid)
        self.stage.enter(name, actor, self.store)
        for record in self.records:
            self.stage.send(name, change_of(record))
        self.stage.send(name, Synced("infaas-catalog"))
        return actor

    def dispatcher(self, name: str = "d0") -> Dispatcher:
        actor = self.stage.members[name].actor
        assert isinstance(actor, Dispatcher)
        return actor

    def predicted(self, name: str = "d0", **fields: Any) -> str:
        """The good model said class 0, the bad one class 1. Returns the query's uid."""
        uid = fields.pop("uid", None) or (1000 + next(self.uids)).to_bytes(16, "big")
        items = fields.pop("items", 1)
        inputs = fields.pop("inputs", INPUTS)
        outputs = {"good": {"y": np.repeat(RIGHT, items, 0)}, "bad": {"y": np.repeat(WRONG, items, 0)}}
        p = {"good": 0.5, "bad": 0.5}
        values: dict[str, Any] = {"app": "a", "context": None, "digest": digest_of(encode(inputs))} | fields
        self.dispatcher(name).composites.predictions.add(
            Prediction(uid, at=self.stage.now, members=MEMBERS, p=p, outputs=outputs, items=items, **values)
        )
        return uid.hex()

    def tell(self, app: str = "a", seconds: float = 1.0, **fields: Any) -> str:
        """Send a feedback; its reply subject. The label 0 is what the good model says."""
        reply = f"_INBOX.{next(self.replies)}"
        self.stage.publish(self.subjects.feedback(app), {"label": 0} | fields, reply)
        self.stage.run(seconds)
        return reply

    def said(self, reply: str) -> list[Any]:
        return [decode(dict[str, Any], body) for _, subject, body in self.stage.heard if subject == reply]

    def answer(self, reply: str) -> str:
        """The one reply: "accepted", or the code and message of the refusal."""
        [one] = self.said(reply)
        return "accepted" if one.get("accepted") else f"{one['error']['code']}: {one['error']['message']}"

    def rows(self, context: str | None = None, app: str = "a") -> dict[str, dict[str, Any]]:
        """What any dispatcher says has been learnt, by member."""
        reply = f"_INBOX.list{next(self.replies)}"
        self.stage.publish(self.subjects.list("selection"), ListRequest(app=app, context=context), reply)
        self.stage.run(0.1)
        [one] = self.said(reply)
        return {row["member"]: row for row in one["items"]}

    def taught(self, context: str | None = None) -> int:
        return max(row["n"] for row in self.rows(context).values())

    def events(self, kind: type) -> list[Any]:
        return [event for _, event in self.stage.records if type(event) is kind]
