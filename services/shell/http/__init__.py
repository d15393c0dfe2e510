"""The HTTP/1.1 server of the gateway, the engine proxy and every process's pages; and a client for pages and the engine."""
