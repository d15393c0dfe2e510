"""Importing the package must stay quick: commands and services import it before they know what they need."""

import subprocess
import sys

import pytest

import infaas

HEAVY = ("numpy", "nats", "onnxruntime", "torch", "psycopg", "rich", "asyncio")


def test_importing_and_connecting_load_nothing_heavy() -> None:
    code = f"import infaas, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
    code = "import infaas, sys; infaas.connect, infaas.Client; print([m for m in ('numpy', 'nats', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", infaas.__all__)
def test_every_public_name_exists_and_says_what_it_is(name):
    assert getattr(infaas, name).__doc__
    assert name in dir(infaas)


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        infaas.conect  # noqa: B018
