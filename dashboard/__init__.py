"""The dashboard: what runs, what it costs and why, from the database as its read-only role sees it."""
