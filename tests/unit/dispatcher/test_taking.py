"""Whose query it is: the same retry key names the same query for its own sender only."""

from bus.codec import decode, encode
from bus.messages.public import QueryHead, Tensor
from services.core.actor import Changed, Envelope
from services.core.catalog import key_of
from services.core.cluster import ClusterView
from services.dispatcher.apps import Apps
from services.dispatcher.query import Query
from services.dispatcher.taking import Intake
from tests.support.simulated.fleet import PRICES, catalogue, variant


def intake() -> Intake:
    apps = Apps(ClusterView(PRICES, "cost"))
    for app in ("faces", "numbers"):
        for record in catalogue(variant(), app=app):
            apps.changed(Changed("b", key_of(record), encode(record)))
    apps.all_in()
    return Intake(apps, lambda: b"fresh" * 3 + b"!", 30.0, 2**20)


def uid(taker: Intake, app: str, reply: str) -> bytes:
    body = encode({"inputs": Tensor("FP32", [1, 2], bytes(8)), "retry_key": b"k" * 16})
    found = taker.take(app, Envelope(1.0, decode(QueryHead, body), f"infaas.query.{app}", reply, body))
    assert isinstance(found, Query), found
    return found.uid


def test_a_retry_key_is_its_senders_own() -> None:
    taker = intake()
    mine = uid(taker, "faces", "_INBOX_.faces.phone.x.1")
    assert uid(taker, "faces", "_INBOX_.faces.phone.y.2") == mine  # another connection of the same user
    others = [
        uid(taker, "faces", "_INBOX_.faces.tablet.x.1"),
        uid(taker, "numbers", "_INBOX_.faces.phone.x.1"),
        uid(taker, "faces", "_INBOX_.@.gateway.x.1"),
        uid(taker, "faces", "_INBOX.x.1"),
        uid(taker, "faces", "mine.1"),
    ]
    assert len({mine, *others}) == 6
