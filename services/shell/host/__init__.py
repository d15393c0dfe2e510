"""One machine's part of a system: its hardware, the processes that are kept running, NATS and PostgreSQL of our own."""
