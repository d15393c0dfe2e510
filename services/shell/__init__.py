"""The only asyncio plumbing: the runtime that drives actors, embedded servers, settings, the store, supervision."""
