"""Clipper's REST interface: predictions and feedback of applications, and their management below /admin."""
