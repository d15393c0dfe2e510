"""The generator of the AsyncAPI document of everything on the bus, generated from the message types (`python -m tools.asyncapi`)."""
