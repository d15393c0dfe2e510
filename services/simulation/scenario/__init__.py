"""What is simulated: a scenario file read, checked and made into records, machines, loads and policies."""
