"""The table of a run, as Markdown that also reads well on a terminal. Pure."""

from collections.abc import Callable, Mapping

from benches.scoreboard.table import aligned
from proof.timeline import Figures, ratios


def short(variant: str, hardware: str) -> str:
    """`views-v1-ort-fp32-t1-b8` on a CPU -> `cpu fp32 t1 b8`; what is simulated says so."""
    return " ".join([hardware, *variant.split("-")[-3:]])


def table(of: Mapping[str, Figures], hardware: Mapping[str, str]) -> str:
    """One column a policy, one line a figure."""

    def number(value: float | None, form: str) -> str:
        return "—" if value is None else format(value, form)

    def listed(values: Mapping[str, int]) -> str:
        return ", ".join(f"{count} × {name}" for name, count in values.items()) or "—"

    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("queries", lambda f: f"{f.queries:,}"),
        ("answered in time", lambda f: f"{f.in_time:,}"),
        ("answered late", lambda f: f"{f.late:,}"),
        ("refused", lambda f: f"{f.refused:,}"),
        ("failed", lambda f: f"{f.failed:,}"),
        ("SLO violations", lambda f: f"{f.violation_ratio:.1%}"),
        ("mean accuracy of answers in time", lambda f: number(f.accuracy, ".4f")),
        ("latency p50 / p99, ms", lambda f: f"{number(f.p50_ms, '.0f')} / {number(f.p99_ms, '.0f')}"),
        ("answers by the real CPU", lambda f: f"{f.real:,}"),
        ("… right, of those that were computed", lambda f: number(f.right, ".1%")),
        ("cost of the instances, US$ × 10⁻³", lambda f: f"{1e3 * f.cost:.3f}"),
        ("bill of all devices, US$ × 10⁻³", lambda f: f"{1e3 * f.bill:.1f}"),
        ("scaling actions", lambda f: listed(f.actions)),
        ("most instances at a time", lambda f: listed({short(v, hardware.get(v, "")): n for v, n in f.most.items()})),
    ]
    rows = [["", *of], *([title, *(show(each) for each in of.values())] for title, show in lines)]
    return aligned(rows)


def compared(of: Mapping[str, Figures]) -> str:
    """What infaas costs and misses beside each other policy; "" without infaas or others."""
    found = ratios(of)
    if not found:
        return ""
    rows = [["infaas over", "cost", "SLO violations", "answers in time"]]
    for name, over in found.items():
        rows.append([name, *(_inverse(over[key]) for key in ("cost", "violations", "in_time"))])
    return aligned(rows)


def _inverse(ratio: float | None) -> str:
    if ratio is None:
        return "0"
    return "—" if ratio == 0 else f"{1 / ratio:.2f}"
