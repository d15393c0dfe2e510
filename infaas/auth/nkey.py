"""Nkeys: ed25519 keys as NATS writes them. The servers know the public half only."""

import os
from typing import NamedTuple


class Pair(NamedTuple):
    """seed: SU…, a secret; public: U…"""

    seed: str
    public: str


def new_pair() -> Pair:
    """A fresh user key."""
    import nkeys  # noqa: PLC0415  (brings libsodium along)

    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return Pair(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())
