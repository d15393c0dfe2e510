"""Functions of a model's owner before and after the model, and what runs them item by item. They run in a sandbox, and in the owner's own process.

`before` gets an item of a query: the value of its only input (bytes, a text, an array), or a map by the inputs' names. It gives what the model
takes: an array, or a map of them. `after` gets the model's answer to the item, in the same form, and gives a text, numbers, or a map of them. A value
alone is named as the function. No function sees another item than its own.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bus.tensors import Array

Function = Callable[..., Any]


class FunctionFailed(Exception):
    """A function cannot be had, or failed. refused: it said by a ValueError that the item is wrong. The text names the function."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class Alike(NamedTuple):
    """Items whose arrays have the same shapes, together. places: theirs in the query's batch. arrays: [n, ...] each, by name."""

    places: list[int]
    arrays: "dict[str, Array]"


def made(name: str, source: str | bytes, what: str) -> Function:
    """The function of this name in a file of Python, which is run. what: it is called, in errors. Raises FunctionFailed."""
    scope: dict[str, Any] = {"__name__": "own"}
    try:
        exec(compile(source, f"the file of {name}", "exec"), scope)  # noqa: S102  (the sandbox is for what others wrote)
        found: Function = scope[name]
    except Exception as error:
        alone = "; it is sent alone: put what it imports into it, or install that on the workers"
        raise FunctionFailed(
            f"{what}: its file cannot be run: {_said(error)}{alone * isinstance(error, ImportError)}"
        ) from error
    return found


def applied(function: Function, what: str, inputs: "Mapping[str, Any]") -> list[Alike]:
    """What a function makes of each item. inputs: by name, of n items each. what: it is called, in errors. Raises FunctionFailed."""
    import numpy as np  # noqa: PLC0415  (a sandbox must not have threads before it is locked)

    names, alone = list(inputs), len(inputs) == 1
    alike: dict[Any, tuple[list[int], list[dict[str, Array]]]] = {}
    for place, values in enumerate(zip(*inputs.values(), strict=True)):
        try:
            given = function(values[0] if alone else dict(zip(names, values, strict=True)))
        except Exception as error:
            raise FunctionFailed(f"{what}: {_said(error)}", refused=isinstance(error, ValueError)) from error
        found = given if isinstance(given, Mapping) else {what.rpartition(":")[2]: given}
        try:
            arrays = {
                str(name): np.asarray(one, object) if isinstance(one, str) else np.asarray(one)
                for name, one in found.items()
            }
        except ValueError as error:
            raise FunctionFailed(f"{what} gives what is no array: {_said(error)}") from error
        wrong = [name for name, one in arrays.items() if one.dtype.kind not in "biufU" and not _texts(one)]
        if wrong or not arrays:
            name = wrong[0] if wrong else ""
            raise FunctionFailed(
                f"{what} gives {type(found[name]).__name__ if wrong else 'nothing'}: give numbers, texts, or a map of them"
            )
        places, items = alike.setdefault(tuple((name, one.shape) for name, one in arrays.items()), ([], []))
        places.append(place)
        items.append(arrays)
    return [
        Alike(places, {name: np.stack([one[name] for one in items]) for name in items[0]})
        for places, items in alike.values()
    ]


def in_place(parts: list[Alike]) -> "dict[str, Array] | None":
    """All items in their order; None: they have not one shape."""
    import numpy as np  # noqa: PLC0415

    if len({tuple((name, one.shape[1:]) for name, one in part.arrays.items()) for part in parts}) > 1:
        return None
    order = np.argsort(np.concatenate([part.places for part in parts]))
    return {name: np.concatenate([part.arrays[name] for part in parts])[order] for name in parts[0].arrays}


def _texts(array: "Array") -> bool:
    return array.dtype.kind == "O" and all(isinstance(one, str) for one in array.reshape(-1).tolist())


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
