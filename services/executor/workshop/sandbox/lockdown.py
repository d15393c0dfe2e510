"""The rights that a sandbox gives up before it touches an uploaded file. Limits always; the others as far as this kernel allows.

- User and network namespaces of its own: no network, no access to other processes of the same user.
- Landlock: it reads Python and system libraries, writes its scratch directory, starts no program. Newer kernels: no TCP, no signals to
  other processes.
- seccomp: it starts threads, but no processes, which could outlive it, hold what it inherited, or fill the machine.
- No new privileges. It dies with its parent.

A container usually allows no namespaces. There Landlock alone protects.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

import bus
import services
from services.executor.workshop.sandbox.protocol import SandboxLimits

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_CLONE_THREAD = 0x10000
NICE = 10  # serving comes first
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 38, 4, 22
# Landlock: three system calls with the same numbers on every architecture, and its access bits of the first version.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_ALL = (1 << 13) - 1
_VERSION = 1  # flag: which version this kernel has
_NO_TCP = 1 | 1 << 1  # binding and connecting, from version 4 on
_SCOPED = 1 | 1 << 1  # abstract sockets and signals, from version 6 on
_READ = _READ_FILE | _READ_DIR
_WRITE = _ALL & ~1  # everything but executing
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
)
# seccomp: of each machine its number, that of clone, and those of calls that always make a process. clone3 has one number everywhere.
_CALLS = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
_CLONE3, _X32 = 435, 0x40000000  # calls from here on are those of another machine's numbering
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/proc/self")
# The device files that a task on an accelerator opens as well.
_NODES = {"gpu": ("nvidia*", "nvidia-caps/*")}


def lock_down(limits: SandboxLimits, scratch: Path, readable: Iterable[str]) -> list[str]:
    """Give up everything except the scratch directory and these files. Returns what this kernel did not support."""
    libc = ctypes.CDLL(None, use_errno=True)
    missing = []
    _limit(limits)
    if not _unshare(libc):
        missing.append("namespaces")
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not _landlock(libc, scratch, readable, limits.hardware):
        missing.append("landlock")
    if not _no_processes(libc):
        missing.append("seccomp")
    return missing


def die_with(parent: int) -> None:
    """Die with this parent, which may be dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def hide() -> None:
    """Keep this process's environment and memory from other processes of the same user, and die with the parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)


def _limit(limits: SandboxLimits) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    # No limit on address space: thread stacks and arenas reserve gigabytes that nobody touches. The limit is on data, except where a
    # driver maps a device's memory; there only the supervisor checks what is resident.
    if limits.hardware == "cpu":
        _set(resource.RLIMIT_DATA, limits.memory_bytes)
    _set(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set(resource.RLIMIT_NOFILE, 256 if limits.hardware == "cpu" else 1024)
    _set(resource.RLIMIT_CORE, 0)
    # No RLIMIT_CPU: it makes the processor clock as coarse as the tick, and the supervisor limits the time anyway.


def _set(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))


def _unshare(libc: ctypes.CDLL) -> bool:
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError:
        pass  # an unmapped user may still read and write its own files
    return True


def _no_processes(libc: ctypes.CDLL) -> bool:
    """Refuse all calls that make a process. glibc starts a thread by clone, whose flags can be seen, where clone3 is unknown."""
    if os.uname().machine not in _CALLS:
        return False
    machine, clone, others = _CALLS[os.uname().machine]
    load, equal, least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    # Each is (what, operand, where to if so, where to if not). Nowhere is the next one.
    program: list[tuple[int, int, str, str]] = [
        (load, 4, "", ""),
        (equal, machine, "", "refuse"),
        (load, 0, "", ""),
        (least, _X32, "refuse", ""),
        *((equal, number, "refuse", "") for number in others),
        (equal, _CLONE3, "unknown", ""),
        (equal, clone, "", "allow"),
        (load, 16, "", ""),  # clone's flags
        (has, _CLONE_THREAD, "allow", "refuse"),
    ]
    ends = {"allow": 0x7FFF0000, "refuse": 0x00050000 | errno.EPERM, "unknown": 0x00050000 | errno.ENOSYS}
    place = {name: len(program) + i for i, name in enumerate(ends)}
    steps = [
        struct.pack("HBBI", what, *(place[to] - i - 1 if to else 0 for to in (yes, no)), operand)
        for i, (what, operand, yes, no) in enumerate(program)
    ]
    steps += [struct.pack("HBBI", give, 0, 0, value) for value in ends.values()]
    code = ctypes.create_string_buffer(b"".join(steps))
    whole = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    return int(libc.prctl(_PR_SET_SECCOMP, 2, whole, 0, 0)) == 0


def device_files(hardware: str, directory: Path = Path("/dev")) -> list[str]:
    """The files through which devices of this kind are reached."""
    return sorted(str(path) for pattern in _NODES.get(hardware, ()) for path in directory.glob(pattern))


def _landlock(libc: ctypes.CDLL, scratch: Path, readable: Iterable[str], hardware: str) -> bool:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    fields = [_ALL] + [_NO_TCP] * (version >= 4) + [_SCOPED] * (version >= 6)
    handled = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0)
    if ruleset < 0:
        return False
    try:
        _allow(libc, ruleset, _READ, (*_SYSTEM, *_python(), *readable))
        _allow(libc, ruleset, _READ | _WRITE_FILE, (*_DEVICES, *device_files(hardware)))
        _allow(libc, ruleset, _WRITE, (str(scratch),))
        return int(libc.syscall(_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def _python() -> Iterable[str]:
    """Where this Python and its packages are. Of this project's root only the packages, since state may lie beside them."""
    root = str(Path(bus.__path__[0]).parent)
    yield from (sys.prefix, sys.base_prefix, *bus.__path__, *services.__path__)
    yield from (path for path in sys.path if path and path != root)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def _allow(libc: ctypes.CDLL, ruleset: int, access: int, paths: Iterable[str]) -> None:
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # Rules for plain files know no directory rights.
            rights = access if os.path.isdir(path) else access & (_READ_FILE | _WRITE_FILE)
            rule = _Beneath(rights, fd)
            libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
        finally:
            os.close(fd)
