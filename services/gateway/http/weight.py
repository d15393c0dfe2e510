"""What JSON becomes in memory, told before it is read: `[],` takes three bytes as text, and sixty as an empty list."""

import msgspec

from services.gateway.door import Problem

FREE = 2**18  # bytes of text that are read whatever they become
MOST = 48 * 2**20  # bytes that the text may become
LIST, MAP, ITEM = 64, 240, 32  # bytes that each takes in CPython, about

_skip = msgspec.json.Decoder(msgspec.Raw).decode  # looks at all of it, and keeps nothing


def weigh(text: bytes, end: int | None = None) -> None:
    """Raises Problem where the JSON in `text`, or in its first `end` bytes, would take too much memory: 413, or 400 where it is none.

    Counts the marks between items wherever they stand: texts with that many commas in them weigh less than it seems, but not
    much less.
    """
    end = len(text) if end is None else end
    if end <= FREE:
        return
    weight = LIST * text.count(b"[", 0, end)
    if weight <= MOST:
        weight += MAP * text.count(b"{", 0, end)
    if weight <= MOST:
        weight += ITEM * text.count(b",", 0, end)
    if weight > MOST:
        try:
            _skip(memoryview(text)[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            raise Problem(None, "the JSON is nested too deeply" if deep else f"this is no JSON: {error}") from error
        raise Problem(
            None,
            f"as JSON this would take more than {MOST // 2**20} MiB of memory: send large tensors as binary data, or in parts",
            code="too_large",
        )
