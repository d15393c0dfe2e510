"""When an app's default output is given: one definition for dispatchers, which hold queries, and executors, which run them. Pure."""

SHARE = 0.03  # of the time that the query had
MOST = 0.02  # s


def default_at(arrived: float, deadline: float) -> float:
    """The moment, in Unix seconds: before the deadline by what the answer's way to its client may take."""
    return deadline - min(MOST, SHARE * max(0.0, deadline - arrived))
