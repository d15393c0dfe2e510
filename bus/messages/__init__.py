"""Every message, one frozen msgspec Struct each, by conversation.

public (outsiders), flow (a query's way), fleet (workers and instances), work (registration), catalog (records), events (history).
"""
