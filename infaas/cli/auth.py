"""`infaas auth VERB`: who may do what on the bus, with keys of their own (docs/security.md)."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from bus.rights import USUAL, Role, Verb, rights, sharing
from bus.subjects import Subjects
from infaas.auth.certificates import certify
from infaas.auth.credentials import CONFIG, CredentialStore, User
from infaas.cli.options import Json
from infaas.cli.output import Column, local_time, print_table, progress, show, usage

VERBS = ("init", "certify", "add", "rotate", "revoke", "list", "show")
NAMED = ("add", "rotate", "revoke", "show")
Several = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


def auth(
    verb: str,
    name: str | None = None,
    /,
    *,
    directory: Annotated[Path, Parameter(name="--dir")] = Path("auth"),
    prefix: str = "infaas",
    role: Several = (),
    app: str = "",
    may: Several = (),
    worker: str = "*",
    bucket: Several = (),
    tls_host: Several = (),
    wholly: bool = False,
    json: Json = False,
) -> int:
    """Make, change and withdraw credentials for the bus, and write what the NATS servers must know of them.

    Verbs: init (a book with a user for each service), certify (a new certificate for the servers), add NAME, rotate NAME (a new key; the old one stays good), revoke NAME (the old
    key; the only one: the user), list, show NAME (what it may publish and subscribe). After each change have every nats-server read
    nats-auth.conf again.

    Parameters
    ----------
    verb
        What to do.
    name
        The user.
    directory
        Where the book of users is.
    prefix
        The cluster's (init).
    role
        What the user is (add): client, operator, a service, or several of a process that runs several.
    app
        The app whose client it is (add, with the role client).
    may
        What the client may do (add): query, feedback, explain, job, list; all but list where it is left out.
    worker
        The one worker that the user's processes belong to (add); any where it is left out.
    bucket
        Buckets of the object store that the user may read and write besides (add), for inputs and outputs of jobs. Operators make them.
    tls_host
        Names and addresses of the servers (init, certify): makes a certificate authority and a certificate for them.
    wholly
        Withdraw all keys at once (revoke).

    """
    if verb not in VERBS:
        usage(f"verb: {verb!r} is none of {', '.join(VERBS)}")
    if (verb in NAMED) != (name is not None):
        usage(f"{verb} needs the name of a user" if name is None else f"{verb} takes no name of a user")
    book, name = CredentialStore(directory), name or ""
    match verb:
        case "init":
            users = book.begin(prefix)
            if tls_host:
                certify(directory, tls_host)
            _told(book, users, json, changed=True)
        case "certify":
            if not tls_host:
                usage("certify needs the names and addresses of the servers: --tls-host")
            users = book.users()
            certify(directory, tls_host)
            _told(book, users, json, changed=True)
        case "list":
            _told(book, book.users(), json)
        case "show":
            _show(book, name, json)
        case "add":
            user = User(
                name=name,
                roles=cast("tuple[Role, ...]", role),
                app=app,
                worker=worker,
                verbs=cast("tuple[Verb, ...]", may) or USUAL,
                buckets=bucket,
            )
            _told(book, [book.add(user)], json, changed=True)
        case "rotate":
            _told(book, [book.rotate(name)], json, changed=True)
        case _:
            _told(book, [book.revoke(name, wholly=wholly)], json, changed=True)
    return 0


def _told(book: CredentialStore, users: list[User], json: bool, *, changed: bool = False) -> None:
    items = [
        {
            "name": user.name,
            "roles": list(user.roles),
            "app": user.app,
            "may": list(user.verbs) if user.app else [],
            "worker": user.worker,
            "buckets": list(user.buckets),
            "inbox": user.identity.inbox,
            "keys": [
                {"public": key.public, "created": datetime.fromtimestamp(key.created, UTC).isoformat()}
                for key in user.keys
            ],
            "credentials": str(book.file_of(user.name)) if user.keys else None,
        }
        for user in users
    ]
    show({"users": items}, json, lambda _: print_table(items, _COLUMNS, "no users"))
    if changed:
        progress(f"have every nats-server read {book.directory / CONFIG} again: nats-server --signal reload=PID")


def _show(book: CredentialStore, name: str, json: bool) -> None:
    found = [identity for identity in sharing(user.identity for user in book.users()) if identity.name == name]
    if not found:
        usage(f"there is no user {name!r} in {book.directory}")
    allowed = rights(found[0], Subjects(book.prefix))

    def render(_: Any) -> None:
        for what, patterns in (("publish", allowed.publish), ("subscribe", allowed.subscribe)):
            print(f"{what}:", *patterns, sep="\n  ")

    show({"name": name, "publish": allowed.publish, "subscribe": allowed.subscribe}, json, render)


_COLUMNS = (
    Column("user", "name"),
    Column("roles", lambda item: "+".join(item["roles"])),
    Column("app", "app"),
    Column("worker", "worker"),
    Column("keys", lambda item: len(item["keys"])),
    Column("newest", lambda item: local_time(item["keys"][-1]["created"]) if item["keys"] else None),
    Column("credentials", "credentials"),
)
