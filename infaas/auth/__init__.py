"""Who may do what on the bus: credentials, and the configuration of the NATS servers that know them (docs/security.md)."""
