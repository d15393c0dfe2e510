"""The gateway over gRPC. Nothing of it is imported where gRPC is off."""
