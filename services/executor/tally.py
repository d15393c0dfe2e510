"""What a device has computed of one variant since it started. Pure."""


class BatchTally:
    """sizes: batches by their items; seconds: computing them."""

    __slots__ = ("seconds", "sizes")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.seconds = 0.0

    def add(self, items: int, seconds: float) -> None:
        """One batch."""
        self.sizes[items] = self.sizes.get(items, 0) + 1
        self.seconds += seconds
