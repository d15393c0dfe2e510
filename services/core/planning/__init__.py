"""Which variants should run, and how many of each: the planning problem and its solvers, all pure."""
