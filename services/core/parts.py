"""Whether a system is ready: one function decides, for every door that tells it (docs/metrics.md). Pure."""

from collections.abc import Iterable

from msgspec import Struct


class SystemPart(Struct, frozen=True, kw_only=True):
    """What is known of one process of a system.

    starting: it has not been up since it was first started. watched: it counts the turns of its loop, so that silence is known without its page.
    silent_s: s that it has not turned, or not answered, 0 while it does. says: what it says that it lacks; None: its page does not answer.
    serves: queries need it; without the others only history, registrations, scaling or pages for people stand still.
    """

    name: str
    running: bool = True
    starting: bool = False
    watched: bool = False
    silent_s: float = 0.0
    says: tuple[str, ...] | None = ()
    serves: bool = True


class Missing(Struct, frozen=True):
    """One thing that a system lacks, in words. serves: queries need it."""

    what: str
    serves: bool


def missing(parts: Iterable[SystemPart], *, started: bool) -> list[Missing]:
    """What the system lacks. It is ready when this is empty, and queries can be answered when nothing of it serves.

    A part that starts for the first time, as a new worker does, is no loss to queries. A page that comes late is none either where the part
    is known to turn: it is busy. started: everything that belongs to the system has been started.
    """
    found = [] if started else [Missing("the system: it is starting or stopping", serves=True)]
    for part in parts:
        serves = part.serves and not part.starting
        if not part.running:
            found.append(Missing(f"{part.name}: does not run", serves))
        elif part.silent_s > 0:
            found.append(Missing(f"{part.name}: silent for {part.silent_s:.1f} s", serves))
        elif part.says is None:
            found.append(Missing(f"{part.name}: does not answer", serves and not part.watched))
        else:
            found += [Missing(f"{part.name}: {word}", serves) for word in part.says]
    return found
