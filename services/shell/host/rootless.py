"""Runs a program that refuses root, or a user without an account, as another user: in a user namespace, or as `nobody`."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from services.shell.host.process import ServerError, launched

Mode = Literal["plain", "userns", "setuid"]


class ProcessIdentity(NamedTuple):
    """The user that a program runs as.

    plain: our own. userns: our own, shown as `uid` inside a user namespace without capabilities outside; it may open what we may, and
    nothing has to be set up. setuid: really `uid` (where namespaces are refused, as in Docker).
    """

    mode: Mode
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Give a file or directory of ours to this user, where it is another one."""
        if self.mode == "setuid":
            os.chown(path, self.uid, self.gid)


def choose_identity(program: list[str], *, allow_userns: bool = True) -> ProcessIdentity:
    """The identity with the fewest changes that can run `program` here (a quick command such as `postgres --version`).

    Root without user namespaces gets `setuid`, whether or not that user can reach the program (see `reachable_copy`).
    Raises ServerError for a user without an account (as containers have them) where there are no user namespaces.
    """
    if os.geteuid() != 0 and _has_account(os.geteuid()):
        return ProcessIdentity("plain", os.geteuid(), os.getegid())
    user = _unprivileged_user()
    confined = ProcessIdentity("userns", user.pw_uid, user.pw_gid)
    if allow_userns and sys.platform == "linux" and runs(program, confined):
        return confined
    if os.geteuid() != 0:
        raise ServerError(
            f"PostgreSQL cannot run as user {os.geteuid()}, who is not in /etc/passwd: run as a user who is, "
            "or name a database of your own (setting store.dsn)"
        )
    return ProcessIdentity("setuid", user.pw_uid, user.pw_gid)


def runs(program: list[str], identity: ProcessIdentity) -> bool:
    """Whether `program` runs as this user and succeeds."""
    done = subprocess.run(launched(program, identity), capture_output=True, cwd="/", check=False)
    return done.returncode == 0


def reachable_copy(tree: Path, beside: Path, to: Path) -> Path:
    """Copy `tree` (and the libraries directory `beside` it, if there) below `to`, for a user who cannot reach it.

    Both keep their names side by side, since the program finds its libraries by that. Returns the copied tree.
    """
    if not to.exists():
        new = to.with_name(f"{to.name}.{os.getpid()}.new")
        shutil.copytree(tree, new / tree.name)
        if beside.is_dir():
            shutil.copytree(beside, new / beside.name)
        new.chmod(0o755)
        new.rename(to)
    return to / tree.name


def check_reachable(directory: Path) -> None:
    """Raise ServerError unless every directory down to this one may be entered by other users."""
    for place in [directory, *directory.parents]:
        if not place.stat().st_mode & 0o001:
            raise ServerError(
                f"PostgreSQL cannot run as root here and its user may not enter {place}: "
                "choose a data directory such as /var/lib/infaas, or run as an ordinary user"
            )


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _unprivileged_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        for user in pwd.getpwall():
            if user.pw_uid != 0:
                return user
    raise ServerError("PostgreSQL does not run as root and this machine has no other user: add one")
