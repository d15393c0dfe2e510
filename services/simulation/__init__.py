"""The services' own actors on virtual time: an event heap, simulated edges, workloads and reports. Nothing here decides anything."""
