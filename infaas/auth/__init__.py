"""Credentials for the bus, and the configuration of the NATS servers that accept them (docs/security.md)."""
