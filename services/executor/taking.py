"""From a query's raw inputs to work for a queue. The tensors' bytes are not copied: they stay views of the message's body."""

from typing import Any

import msgspec

from bus.messages.flow import Route
from bus.messages.public import QueryInputs, TensorView
from services.executor.work import Work

inputs_of = msgspec.msgpack.Decoder(QueryInputs).decode
_tensor = msgspec.msgpack.Decoder(TensorView).decode
_tensors = msgspec.msgpack.Decoder(dict[str, TensorView | list[Any]]).decode
_list = msgspec.msgpack.Decoder(list[Any]).decode


def work_of(route: Route, body: msgspec.Raw, inputs: msgspec.Raw | bytes) -> Work:
    """Decode one query's inputs. Raises msgspec.DecodeError; IndexError when there are none."""
    try:
        tensor = _tensor(inputs)
    except msgspec.ValidationError:
        first = memoryview(inputs)[0]
        if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
            numbers = _list(inputs)
            return Work(route, body, numbers, max(1, len(numbers)), route.uid)
        return _named(route, body, _tensors(inputs))
    sizes = tensor.shape
    return Work(route, body, tensor, (sizes[0] or 1) if sizes else 1, (tensor.datatype, *sizes[1:]))


def _named(route: Route, body: msgspec.Raw, named: dict[str, TensorView | list[Any]]) -> Work:
    """A query whose inputs have names. One with plain lists among them shares no batch: lists carry no datatype."""
    views = {name: one for name, one in named.items() if isinstance(one, TensorView)}
    if len(views) < len(named):
        items = next(len(one) for one in named.values() if isinstance(one, list))
        return Work(route, body, named, max(1, items), route.uid)
    items = next((view.shape[0] for view in views.values() if view.shape), 1)
    return Work(
        route, body, named, max(1, items), tuple((name, v.datatype, *v.shape[1:]) for name, v in sorted(views.items()))
    )
