"""Assembles the AsyncAPI 3.0 document from the table of channels."""

import re
from typing import Any

from bus.messages.events import Event
from bus.messages.public import Tensor
from tools.asyncapi.channels import Channel, channels
from tools.asyncapi.schema import schemas

PARAMETERS = {
    "item": "place in a list of feedbacks, from 0",
    "number": "number of that list",
    "app": "name of an app",
    "model": "name of a model",
    "version": "version of a model",
    "variant": "name of a variant",
    "worker": "name of a worker",
    "device": "name of a device of that worker, such as cpu",
    "dispatcher": "id of a dispatcher process",
    "controller": "id of a VM-autoscaler process",
    "job": "id of an offline job",
    "order": "number of one of its orders",
    "uid": "id of a query, in hexadecimal digits",
    "registration": "id of a registration",
    "what": "apps, models, variants, workers or jobs",
}


def document() -> dict[str, Any]:
    """The whole document as maps and lists."""
    table = channels()
    carried = [message for channel in table for message in (*channel.messages, *channel.reply)]
    names = {message.__name__: message for message in carried}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "INFaaS on a message bus",
            "version": "1",
            "description": "Bodies are MessagePack. Unknown fields are ignored; a wrong type is refused as bad_request. "
            "`infaas` is the default prefix of all subjects. Generated from bus/messages by `python -m tools.asyncapi`.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {"local": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": {channel.key: _channel(channel) for channel in table} | _replies(table),
        "operations": {channel.key: _operation(channel) for channel in table},
        "components": {
            "messages": {name: _message(message) for name, message in sorted(names.items())},
            "schemas": schemas([Tensor, *carried]),
        },
    }


def _channel(channel: Channel) -> dict[str, Any]:
    entry: dict[str, Any] = {"address": channel.address, "messages": _messages(channel.messages)}
    parameters = re.findall(r"{(\w+)}", channel.address)
    if parameters:
        entry["parameters"] = {name: {"description": PARAMETERS[name]} for name in parameters}
    return entry


def _replies(table: list[Channel]) -> dict[str, Any]:
    """One channel for each set of replies: the requester's inbox, whose address is not known in advance."""
    return {
        f"{channel.key}-reply": {"address": None, "messages": _messages(channel.reply)}
        for channel in table
        if channel.reply
    }


def _operation(channel: Channel) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "action": channel.action,
        "channel": {"$ref": f"#/channels/{channel.key}"},
        "summary": channel.summary,
        "tags": [{"name": channel.tag}],
    }
    if channel.reply:
        entry["reply"] = {
            "address": {"location": "$message.header#/reply-to", "description": "the NATS reply subject"},
            "channel": {"$ref": f"#/channels/{channel.key}-reply"},
        }
    return entry


def _messages(messages: tuple[type, ...]) -> dict[str, Any]:
    return {message.__name__: {"$ref": f"#/components/messages/{message.__name__}"} for message in messages}


def _message(message: type) -> dict[str, Any]:
    payload: dict[str, Any] = {"$ref": f"#/components/schemas/{message.__name__}"}
    if issubclass(message, Event):
        payload = {
            "type": "object",
            "description": "A batch of rows; id is unique, so that a batch that comes twice is stored once.",
            "required": ["id", "rows"],
            "properties": {"id": {"type": "string"}, "rows": {"type": "array", "items": payload}},
        }
    return {"name": message.__name__, "payload": payload}
