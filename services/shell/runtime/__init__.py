"""What every service process runs on: the driver of its actors, its main, its way to the event stream, its logs."""
