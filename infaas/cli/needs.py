"""The requirements of a query as options, the same for `query`, `explain` and `bench`; and how a refusal is told."""

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from infaas.cli.options import Whole
from infaas.cli.table import number
from infaas.errors import Refused
from infaas.queries import Needs


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NeedOptions:
    """What a query demands; what is left out is not demanded."""

    latency_ms: Annotated[float | None, Parameter(help="Answer within so many milliseconds.")] = None
    accuracy: Annotated[float | None, Parameter(help="Measured accuracy of at least this, 0 to 1.")] = None
    cost: Annotated[float | None, Parameter(help="At most so many US$ per 1,000 queries.")] = None
    model: Annotated[str | None, Parameter(help="Only this model.")] = None
    model_version: Annotated[str | None, Parameter(help="Only this version of the model.")] = None
    variant: Annotated[str | None, Parameter(help="Only this variant.")] = None
    context: Annotated[str | None, Parameter(help="Key for personalised selection.")] = None
    priority: Annotated[Whole | None, Parameter(help="1 (highest) to 9.")] = None

    def to_needs(self) -> Needs:
        """As the client takes them."""
        return Needs(
            latency_ms=self.latency_ms,
            accuracy=self.accuracy,
            cost=self.cost,
            model=self.model,
            version=self.model_version,
            variant=self.variant,
            context=self.context,
            priority=self.priority,
        )


NO_NEEDS = NeedOptions()


def told(refused: Refused) -> str:
    """A refusal in one line: why, what comes closest, when to try again."""
    parts = [str(refused)]
    if refused.closest:
        parts.append(f"closest: {_offer(refused.closest)}")
    if refused.retry_after_ms is not None:
        parts.append(f"try again in {number(refused.retry_after_ms)} ms")
    return "; ".join(parts)


def _offer(closest: dict[str, Any]) -> str:
    figures = [
        f"{label} {number(float(value))}{unit}"
        for name, label, unit in (
            ("accuracy", "accuracy", ""),
            ("latency_ms", "latency", " ms"),
            ("cost", "US$", " per 1,000"),
        )
        if isinstance(value := closest.get(name), (int, float))
    ]
    return f"{closest.get('variant')} ({', '.join(figures)})"
