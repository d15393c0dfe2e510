"""What connects actors to the world: the runtime that drives them, processes and servers of a machine, settings, the database, metrics."""
