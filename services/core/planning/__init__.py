"""Which variants should run, and how many of each: the problem, the programme that plans, and the reaction. All pure."""
