"""Clipper's REST interface: predict and update of applications, and their management below /admin."""
