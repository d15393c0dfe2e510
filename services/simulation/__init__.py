"""The services' own actors on virtual time: an event heap, simulated edges, workloads, reports. No decision is made in here."""
