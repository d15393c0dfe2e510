"""The tasks of a sandbox: inspect an upload, build its artifacts, profile them. All code here runs inside the sandbox."""
