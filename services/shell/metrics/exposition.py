"""Pages of metrics, made by prometheus_client in the format that the client prefers.

Importing that library takes a tenth of a second and 1.5 MB, so this module is imported when somebody first asks for a page.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from services.core.metric import Histogram, MetricFamily, gauge, named
from services.shell.http.messages import HttpReply

log = logging.getLogger(__name__)


class Snapshot(Collector):
    """Families that have been collected already: a page shows one moment."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def page(families: Iterable[MetricFamily], most: int = 1000, accept: str = "") -> HttpReply:
    """The page of one process. Of a family with more than `most` samples the rest is left out, and counted in infaas_series_left_out.

    accept: the request's header; OpenMetrics where it is asked for, else Prometheus' text format.
    """
    return _encoded(_metrics(families, most), accept)


def system_page(
    families: Iterable[MetricFamily], pages: Mapping[str, str], most: int = 1000, accept: str = ""
) -> HttpReply:
    """The families of `up` and its processes' pages (name to text format) as one: each series gets the label `process`.

    A page that cannot be read is left out: another program may listen at the port of a process.
    """
    parts: dict[str, list[Metric]] = {}
    for process, text in pages.items():
        try:
            parts[process] = list(text_string_to_metric_families(text))
        except ValueError as error:
            log.warning("the page of %s cannot be read: %s", process, error)
    found: dict[str, Metric] = {}
    for process, metrics in {"up": list(_metrics(families, most)), **parts}.items():
        names = {metric.name for metric in metrics}
        for metric in metrics:
            if metric.name.endswith("_created") and metric.name.removesuffix("_created") in names:
                continue  # the text format shows when a series began as a family of its own, which OpenMetrics cannot
            whole = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            whole.samples += [
                sample._replace(labels={**sample.labels, "process": process}) for sample in metric.samples
            ]
    return _encoded(found.values(), accept)


def _encoded(metrics: Iterable[Metric], accept: str) -> HttpReply:
    registry = CollectorRegistry()
    registry.register(Snapshot(metrics))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        encode, content_type = choose_encoder("")
    return HttpReply([encode(registry)], b"content-type: %s\r\n" % content_type.encode())


def _metrics(families: Iterable[MetricFamily], most: int) -> Iterator[Metric]:
    left_out = gauge("infaas_series_left_out", "Series of a metric beyond metrics.series, which are not shown.")
    for family in named(families):  # also those without samples: they show which metrics there are
        yield _metric(family, most)
        if len(family.samples) > most:
            left_out.add(len(family.samples) - most, metric=family.name)
    if left_out.samples:
        yield _metric(left_out, len(left_out.samples))


def _metric(family: MetricFamily, most: int) -> Metric:
    samples = family.samples[:most]
    # a label that a sample lacks is empty
    names = list(dict.fromkeys(name for labels, _ in samples for name in labels))
    plain = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    histograms = HistogramMetricFamily(family.name, family.help, labels=names)
    numbers = plain(family.name, family.help, labels=names)
    for labels, value in samples:
        texts = [labels.get(name, "") for name in names]
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            histograms.add_metric(texts, buckets, value.total)
        else:
            numbers.add_metric(texts, value)
    return histograms if family.kind == "histogram" else numbers
