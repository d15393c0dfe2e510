"""How a processor adds small integers, from what Linux says of it."""

import pytest

from services.shell.host import processor


@pytest.mark.parametrize(
    ("flags", "machine", "isa", "arithmetic"),
    [
        ("fpu sse2 avx2", "x86_64", "avx2", "saturating"),
        ("avx2 avx512f avx512bw", "x86_64", "avx512f", "saturating"),
        ("avx2 avx512f avx512_vnni", "x86_64", "avx512_vnni", "exact"),
        ("avx2 avx_vnni", "x86_64", "avx_vnni", "exact"),
        ("asimd asimddp", "aarch64", "asimddp", "exact"),
    ],
)
def test_without_vnni_an_x86_saturates(flags: str, machine: str, isa: str, arithmetic: str) -> None:
    name = "Features" if machine == "aarch64" else "flags"
    found = processor.of(f"processor : 0\nmodel name : A Chip\n{name} : {flags}\n\nflags : other\n", machine)
    assert (found.model, found.isa, found.arithmetic) == ("A Chip", isa, arithmetic)


def test_a_silent_system_is_not_taken_for_an_exact_one() -> None:
    assert processor.of("", "x86_64").arithmetic == "saturating"
