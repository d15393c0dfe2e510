"""Loads that failed: a pause that doubles with each failure in a row, and quarantine for what fails again and again. Pure."""

RETRY_FIRST = 1.0  # s until a variant whose load failed may be tried again; doubles
RETRY_LAST = 60.0


class Failures:
    """By variant, on one worker. quarantine_after: failures in a row; 0: never.

    quarantined: variant -> reason; such a variant is not tried again until an operator releases it.
    """

    def __init__(self, quarantine_after: int = 0) -> None:
        self.quarantined: dict[str, str] = {}
        self._after = quarantine_after
        self._of: dict[str, tuple[int, float, str]] = {}

    def failed(self, variant: str, reason: str, now: float) -> bool:
        """One more failure; True when this one puts the variant into quarantine.

        Nothing begins during the pause, so what fails then began with the one that failed before, and counts as one with it.
        """
        count, until, _ = self._of.get(variant, (0, now, ""))
        if now < until:
            return False
        count += 1
        pause = min(RETRY_LAST, RETRY_FIRST * 2.0 ** min(count - 1, 10))
        self._of[variant] = (count, now + pause, reason)
        if not self._after or count < self._after or variant in self.quarantined:
            return False
        self.quarantined[variant] = f"its last {count} loads failed: {reason}"
        return True

    def succeeded(self, variant: str) -> None:
        self._of.pop(variant, None)

    def release(self, variant: str) -> bool:
        """It may be tried again, at once; False when it was not in quarantine."""
        self._of.pop(variant, None)
        return self.quarantined.pop(variant, None) is not None

    def obstacle(self, variant: str, now: float) -> str:
        """Why it may not be tried now; empty when it may."""
        why = self.quarantined.get(variant)
        if why is not None:
            return f"{variant} is quarantined here until infaas.admin.release-variant names it: {why}"
        count, until, reason = self._of.get(variant, (0, 0.0, ""))
        if now >= until:
            return ""
        times = "the last load" if count == 1 else f"the last {count} loads"
        return f"{times} failed ({reason}); it is tried again in {until - now:.0f} s at the earliest"
