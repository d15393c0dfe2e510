"""The dashboard: what runs, what it costs and why. It reads the database with the read-only role."""
