"""HTTP: the server, the router over all dialects, and what holds for every request."""
