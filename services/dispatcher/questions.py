"""What is asked about the system: lists, and what a query would get. Pure."""

from collections.abc import Iterable

from bus.messages.public import ListRequest
from services.core.actor import Effect, Envelope, Publish
from services.core.catalog import Catalog
from services.core.cluster import ClusterView
from services.core.selection import SelectionPolicy
from services.dispatcher.explaining import explain
from services.dispatcher.listing import listing


def question(envelope: Envelope, catalog: Catalog, view: ClusterView, policy: SelectionPolicy) -> Iterable[Effect]:
    """The reply to a ListRequest or to Requirements; nothing where nobody waits for one, or somebody else replies."""
    if not envelope.reply:
        return ()
    about, asked, now = envelope.subject.rpartition(".")[2], envelope.message, envelope.now
    if isinstance(asked, ListRequest):
        if about == "jobs":
            return ()  # their coordinator answers
        return (Publish(envelope.reply, listing(about, asked, now, catalog, view)),)
    return (Publish(envelope.reply, explain(about, asked, now, view, policy)),)
