"""What every service process has: its main, the driver of its actors, the outbox of their events, logs and spans."""
