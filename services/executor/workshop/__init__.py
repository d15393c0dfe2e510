"""The workshop: inspects uploaded models, builds their variants and profiles them, away from serving.

There are three layers. The actor and its edge live in the executor's process; they only queue orders and start the helper. The
helper (`python -m services.executor.workshop`) is trusted: it talks to the bus and the object store, and never opens an uploaded
file itself. For every task (`tasks/`) it starts a sandbox (`sandbox/`), which knows neither bus nor credentials, is limited in
memory, time and files, and replies in typed frames. Uploaded files count as hostile.
"""
