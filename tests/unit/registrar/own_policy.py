"""Classes of a user that the registrar tries."""

import os


class Whole:
    """It has all that a selection policy needs."""

    def init(self, members: object) -> None: ...
    def select(self, *arguments: object) -> None: ...
    def combine(self, *arguments: object) -> None: ...
    def observe(self, *arguments: object) -> None: ...


class Ends:
    """Making one ends its process."""

    def __init__(self) -> None:
        os._exit(3)
