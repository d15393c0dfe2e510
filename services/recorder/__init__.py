"""Events from the bus into the database, acknowledged after commit."""
