"""The processor of this machine: its name, its instruction sets, and how it adds products of small integers."""

import platform
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

# Instruction sets that decide how fast, and for int8 how accurate, a model runs; the best one is named.
_SETS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "asimd")
_EXACT = frozenset({"amx_int8", "avx512_vnni", "avx_vnni"})
X86 = ("x86_64", "AMD64", "i686")


class Processor(Struct, frozen=True, kw_only=True):
    """isa: the best instruction set. arithmetic: "exact", or "saturating": sums of two products of int8 are cut off at 16 bits, so that
    a quantised model may give other answers there (x86 without VNNI).
    """

    model: str
    isa: str
    arithmetic: str


def of(text: str, machine: str) -> Processor:
    """The processor that /proc/cpuinfo describes so. machine: as `platform.machine()`."""
    model, flags = machine, set[str]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in {"flags", "Features"}:
            flags = set(value.split())
            break
    exact = machine not in X86 or bool(flags & _EXACT)
    isa = next((one for one in _SETS if one in flags), machine)
    return Processor(model=model, isa=isa, arithmetic="exact" if exact else "saturating")


@lru_cache(maxsize=1)
def processor() -> Processor:
    """This machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return of(text, platform.machine())
