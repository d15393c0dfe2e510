"""Starts a program that dies with its parent and may run as another user. Run as a script: only the standard library, one thread.

    python launch.py PARENT SIGNUM MODE UID GID PROGRAM [ARGUMENT ...]

A process with threads must not do this between fork and exec: libraries such as gRPC start threads in the forked child, and the kernel
refuses a user namespace to a process with threads. PARENT: pid of the process that must outlive the program. SIGNUM: what the program gets
when the parent's starting thread ends (0: nothing). MODE, UID, GID: see `postgres.ProcessIdentity`. Exit status 126: one line on stderr
says what could not be done.
"""

import ctypes
import os
import sys

NOT_STARTED = 126
_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1


def _enter(libc: ctypes.CDLL, mode: str, uid: int, gid: int) -> None:
    if mode == "userns":
        # inside the namespace they are unknown until they are mapped
        outside_uid, outside_gid = os.geteuid(), os.getegid()
        if libc.unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "no user namespace")
        _write("/proc/self/setgroups", b"deny")
        _write("/proc/self/uid_map", b"%d %d 1" % (uid, outside_uid))
        _write("/proc/self/gid_map", b"%d %d 1" % (gid, outside_gid))
    elif mode == "setuid":
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _main(words: list[str]) -> None:
    parent, signum = int(words[0]), int(words[1])
    command = words[5:]
    libc = ctypes.CDLL(None, use_errno=True)
    _enter(libc, words[2], int(words[3]), int(words[4]))
    # After the change of user, which clears the signal.
    if signum and sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # the parent died before prctl
            sys.exit(NOT_STARTED)
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    try:
        _main(sys.argv[1:])
    except OSError as error:
        print(f"cannot start {sys.argv[6]}: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)
