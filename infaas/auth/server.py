"""What nats-server is told: users with their keys and rights."""

import json
from collections.abc import Iterable, Sequence

from bus.rights import Identity, rights, sharing
from bus.subjects import Subjects

_HEAD = """\
# Written by `infaas auth`: change nothing here. Include it in the configuration of every nats-server, and after each change
# have them read it again: nats-server --signal reload=PID.
"""


def authorization(users: Iterable[tuple[Identity, Sequence[str]]], subjects: Subjects) -> str:
    """The servers' block `authorization`: each user with its public keys, all good at a time."""
    lines = [_HEAD, "authorization {", "  timeout: 5", "  users: ["]
    given = list(users)
    for identity, (_, keys) in zip(sharing(identity for identity, _ in given), given, strict=True):
        allowed = rights(identity, subjects)
        of = f" of the app {identity.app}" if identity.app else ""
        lines.append(f"    # {identity.name}: {'+'.join(identity.roles)}{of}")
        for key in keys:
            lines += [
                f"    {{ nkey: {key}, permissions: {{",
                f"        publish: {{ allow: {json.dumps(allowed.publish)} }}",
                f"        subscribe: {{ allow: {json.dumps(allowed.subscribe)} }}",
                "    } }",
            ]
    return "\n".join([*lines, "  ]", "}", ""])


def tls(certificate: str, key: str) -> str:
    """The servers' block `tls`. The paths are as the servers see them."""
    return f"{_HEAD}tls {{\n  cert_file: {json.dumps(certificate)}\n  key_file: {json.dumps(key)}\n  timeout: 5\n}}\n"
