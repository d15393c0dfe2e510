"""Runs a program that refuses root, or a user without an account, as another user: in a user namespace, or as `nobody`."""

import ctypes
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.shell.host.process import ServerError

_CLONE_NEWUSER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)
Mode = Literal["plain", "userns", "setuid"]


@dataclass(frozen=True)
class ProcessIdentity:
    """The user that a program runs as.

    plain: our own. userns: our own, shown as `uid` inside a user namespace without capabilities outside; it may open what we may, and
    nothing has to be set up. setuid: really `uid` (where namespaces are refused, as in Docker).
    """

    mode: Mode
    uid: int
    gid: int

    def enter(self) -> None:
        """Become this user. Called in the child between fork and exec."""
        if self.mode == "userns":
            outside_uid, outside_gid = (
                os.geteuid(),
                os.getegid(),
            )  # inside the namespace they are unknown until they are mapped
            if _libc.unshare(_CLONE_NEWUSER) != 0:
                raise OSError(ctypes.get_errno(), "unshare")
            _write("/proc/self/setgroups", b"deny")
            _write("/proc/self/uid_map", b"%d %d 1" % (self.uid, outside_uid))
            _write("/proc/self/gid_map", b"%d %d 1" % (self.gid, outside_gid))
        elif self.mode == "setuid":
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)

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
    if allow_userns and sys.platform == "linux" and runs(program, confined.enter):
        return confined
    if os.geteuid() != 0:
        raise ServerError(
            f"PostgreSQL cannot run as user {os.geteuid()}, who is not in /etc/passwd: run as a user who is, "
            "or name a database of your own (setting store.dsn)"
        )
    return ProcessIdentity("setuid", user.pw_uid, user.pw_gid)


def runs(program: list[str], enter: Callable[[], None]) -> bool:
    """Whether `program` runs and succeeds after `enter`. A program that could not be started is tried again: machines are busy."""
    for pause in (0.05, 0.2, 0.0):
        try:
            done = subprocess.run(program, preexec_fn=enter, capture_output=True, cwd="/", timeout=30, check=False)
        except subprocess.SubprocessError:
            time.sleep(pause)
        except OSError:
            return False
        else:
            return done.returncode == 0
    return False


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


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
