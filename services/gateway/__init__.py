"""The gateway: any HTTP or gRPC client becomes a client of the system. An application of the client library."""
