"""`infaas auth VERB`: credentials for the bus, and the rights of their owners (docs/security.md)."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.rights import USUAL, Role, Verb, rights, sharing
from bus.subjects import Subjects
from infaas.cli.options import Json, Verbs, check_verb
from infaas.cli.output import Column, local_time, print_table, progress, show, usage
from infaas.credentials import CONFIG, TOKENS, CredentialStore, User, certify, settings_for

USER = "the name of a user"
VERBS: Verbs = {
    "init": (None, ("--prefix", "--tls-host")),
    "renew": (None, ()),
    "certify": (None, ("--tls-host",)),
    "add": (USER, ("--role", "--app", "--may", "--worker", "--bucket")),
    "rotate": (USER, ()),
    "revoke": (f"{USER} or token", ("--wholly",)),
    "token": ("a name for the token", ("--app", "--days")),
    "list": (None, ()),
    "show": (USER, ()),
}
Several = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


def auth(
    verb: str,
    name: str | None = None,
    /,
    *,
    directory: Annotated[Path, Parameter(name="--dir")] = Path("auth"),
    prefix: str | None = None,
    role: Several = (),
    app: str = "",
    may: Several = (),
    worker: str | None = None,
    bucket: Several = (),
    tls_host: Several = (),
    days: Annotated[float | None, Parameter(validator=Number(gt=0, lte=36500))] = None,
    wholly: bool = False,
    json: Json = False,
) -> int:
    """Make, change and revoke credentials for the bus and the gateway, and write the configuration that NATS servers include.

    After each change of users, have every nats-server read nats-auth.conf again. The verbs:

    * init: make the directory with a user for each service, and infaas.toml for `infaas up`
    * renew: give users the rights that this version needs, as after an upgrade; `infaas up` does so itself
    * certify: make a new certificate for the servers
    * add NAME: add a user
    * rotate NAME: make a new key; the old one stays valid until it is revoked
    * revoke NAME: remove the older of two keys, the user with its only key, or the token
    * token NAME: make a token for HTTP and gRPC, and print it
    * list: list the users and tokens
    * show NAME: list the subjects that the user may publish and subscribe to

    Example: `infaas auth add shop --role client --app digits`

    Parameters
    ----------
    verb
        What to do.
    name
        Name of the user.
    directory
        Directory of the users and their credentials.
    prefix
        Prefix of the cluster's subjects (init). Default: infaas.
    role
        Role of the user (add): client, operator or a service; several for a process that runs several services.
    app
        The app whose client the user is (add, with the role client); the only app that the token is for (token).
    may
        What the client may do (add): query, feedback, explain, job, list. Default: all but list.
    worker
        The only worker whose processes the user may be (add). Default: any worker.
    bucket
        Buckets of the object store that the user may also read and write (add), for inputs and outputs of jobs. Operators make them.
    tls_host
        Names and addresses of the servers (init, certify). Makes a certificate authority and a certificate for them.
    days
        How long the token is valid (token). Default: until it is revoked.
    wholly
        Remove all keys at once (revoke).

    """
    given = {
        "--prefix": prefix, "--role": role, "--app": app, "--may": may, "--worker": worker, "--bucket": bucket, "--tls-host": tls_host,
        "--days": days, "--wholly": wholly,
    }  # fmt: skip
    check_verb(verb, name, VERBS, given)
    store, name = CredentialStore(directory), name or ""
    match verb:
        case "init":
            users = store.begin(prefix or "infaas")
            if tls_host:
                certify(directory, tls_host)
                progress(f"start a system with it: infaas up --config {settings_for(directory)}")
            _print_users(store, users, json, changed=True)
        case "renew":
            if store.renew():
                progress(
                    f"rights are of this version now: have every nats-server read {store.directory / CONFIG} again"
                )
            else:
                progress("rights are of this version already")
        case "certify":
            if not tls_host:
                usage("certify needs the names and addresses of the servers: --tls-host")
            users = store.users()
            certify(directory, tls_host)
            _print_users(store, users, json, changed=True)
        case "list":
            _print_users(store, store.users(), json)
        case "show":
            _show(store, name, json)
        case "add":
            user = User(
                name=name,
                roles=cast("tuple[Role, ...]", role),
                app=app,
                worker=worker or "*",
                verbs=cast("tuple[Verb, ...]", may) or USUAL,
                buckets=bucket,
            )
            _print_users(store, [store.add(user)], json, changed=True)
        case "rotate":
            _print_users(store, [store.rotate(name)], json, changed=True)
        case "token":
            until = None if days is None else time.time() + 86400 * days
            secret = store.add_token(name, app, until)
            shown = {"name": name, "app": app, "until": _date(until), "token": secret}
            show(shown, json, lambda _: print(secret))
            progress(
                f"it is not shown again; gateways know it from {store.directory / TOKENS}, which gateway.tokens names"
            )
        case _ if store.revoke_token(name):
            progress(f"gateways refuse the token {name} within a second")
        case _:
            _print_users(store, [store.revoke(name, wholly=wholly)], json, changed=True)
    return 0


def _print_users(store: CredentialStore, users: list[User], json: bool, *, changed: bool = False) -> None:
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
            "credentials": str(store.file_of(user.name)) if user.keys else None,
        }
        for user in users
    ]
    tokens = (
        []
        if changed
        else [{"name": token.name, "app": token.app, "until": _date(token.until)} for token in store.tokens()]
    )

    def render(_: Any) -> None:
        print_table(items, _COLUMNS, "no users")
        if tokens:
            print_table(tokens, _TOKEN_COLUMNS, "")

    show({"users": items} if changed else {"users": items, "tokens": tokens}, json, render)
    if changed:
        progress(f"have every nats-server read {store.directory / CONFIG} again: nats-server --signal reload=PID")


def _show(store: CredentialStore, name: str, json: bool) -> None:
    found = [identity for identity in sharing(user.identity for user in store.users()) if identity.name == name]
    if not found:
        usage(f"there is no user {name!r} in {store.directory}")
    allowed = rights(found[0], Subjects(store.prefix))

    def render(_: Any) -> None:
        for what, patterns in (("publish", allowed.publish), ("subscribe", allowed.subscribe)):
            print(f"{what}:", *patterns, sep="\n  ")

    show({"name": name, "publish": allowed.publish, "subscribe": allowed.subscribe}, json, render)


def _date(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat()


_TOKEN_COLUMNS = (
    Column("token", "name"),
    Column("app", lambda item: item["app"] or "any"),
    Column("valid until", lambda item: local_time(item["until"]) if item["until"] else None),
)
_COLUMNS = (
    Column("user", "name"),
    Column("roles", lambda item: "+".join(item["roles"])),
    Column("app", "app"),
    Column("worker", "worker"),
    Column("keys", lambda item: len(item["keys"])),
    Column("newest", lambda item: local_time(item["keys"][-1]["created"])[:10] if item["keys"] else None),
    Column("credentials", "credentials", flows=True),
)
