"""All messages. Each message is one frozen msgspec Struct. Each module holds the messages of one subject area.

public: clients. flow: the path of a query. fleet: workers and instances. scaling: demand and machines. work: registration.
jobs: offline jobs. catalog: records. events: history.
"""
