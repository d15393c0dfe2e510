"""Prometheus' text format: families to a page, and the pages of several processes to one."""

from collections.abc import Iterable, Mapping

from services.core.metric import Family, Histogram, named

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def render(families: Iterable[Family], most: int = 1000) -> str:
    """The page. Of a family with more than `most` samples the rest is left out, and counted in infaas_series_left_out."""
    lines: list[str] = []
    left_out = Family(
        "infaas_series_left_out", "gauge", "Series of a metric beyond metrics.series, which are not shown."
    )
    for family in named(families):  # also one without samples: so what there may be is seen
        _write(family, family.samples[:most], lines)
        if len(family.samples) > most:
            left_out.add(len(family.samples) - most, metric=family.name)
    if left_out.samples:
        _write(left_out, left_out.samples, lines)
    return "\n".join(lines) + "\n"


def _write(family: Family, samples: Iterable[tuple[dict[str, str], float | Histogram]], lines: list[str]) -> None:
    name = family.name
    lines.append(f"# HELP {name} {family.help}")
    lines.append(f"# TYPE {name} {family.kind}")
    for labels, value in samples:
        inner = ",".join(f'{key}="{text.translate(_ESCAPED)}"' for key, text in labels.items())
        if isinstance(value, Histogram):
            below = 0
            comma = "," if inner else ""
            for bound, count in zip(value.bounds, value.counts, strict=False):
                below += count
                lines.append(f'{name}_bucket{{{inner}{comma}le="{bound:g}"}} {below}')
            lines.append(f'{name}_bucket{{{inner}{comma}le="+Inf"}} {value.count}')
            braces = f"{{{inner}}}" if inner else ""
            lines.append(f"{name}_sum{braces} {value.total!r}")
            lines.append(f"{name}_count{braces} {value.count}")
        else:
            lines.append(f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}")


def merge(pages: Mapping[str, str]) -> str:
    """One page of several processes' (name to page, as `render` made it): each series gets the label `process`."""
    found: dict[str, tuple[list[str], list[str]]] = {}  # family -> its two comments, its series
    for process, page in pages.items():
        label = f'process="{process.translate(_ESCAPED)}"'
        series: list[str] = []
        for line in page.splitlines():
            if line.startswith("# "):
                comments, series = found.setdefault(line.split(" ", 3)[2], ([], []))
                if len(comments) < 2:
                    comments.append(line)
                continue
            name, _, value = line.rpartition(" ")
            plain, brace, rest = name.partition("{")
            series.append(f"{plain}{{{label},{rest} {value}" if brace else f"{plain}{{{label}}} {value}")
    lines = [line for comments, series in found.values() for line in (*comments, *series)]
    return "\n".join(lines) + "\n"
