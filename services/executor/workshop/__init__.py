"""The workshop: inspects uploaded models, builds their variants and profiles them, away from serving.

Three layers. The actor and its edge live in the executor's process and only queue orders and start the helper. The helper
(`python -m services.executor.workshop`) is trusted: it talks to the bus and the object store and never opens an uploaded
file itself. For every step it starts a sandbox (`sandbox.py`), which knows neither bus nor credentials, is limited in memory,
time and files, and answers in typed frames. Uploaded files are hostile until proven.
"""
