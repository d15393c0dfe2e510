"""Pages of our families, read back as they were meant."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from services.core.metric import Histogram, MetricFamily
from services.shell.metrics.exposition import page, system_page

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str, *, openmetrics: bool = False) -> Found:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in (read_openmetrics if openmetrics else read_text)(text)
        for sample in family.samples
    }


def gauge(value: float, **labels: str) -> MetricFamily:
    family = MetricFamily("infaas_g", "gauge", "A gauge.")
    family.add(value, **labels)
    return family


@given(
    st.text(alphabet=st.characters(codec="utf-8")),
    st.floats(allow_nan=False),
)
def test_whatever_a_label_holds_it_is_read_back(label: str, value: float) -> None:
    assert read(page([gauge(value, app=label)]).text) == {("infaas_g", (("app", label),)): value}
    body = system_page([], {"one": page([gauge(value, app=label)]).text}).text
    assert read(body) == {("infaas_g", (("app", label), ("process", "one"))): value}


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    family = MetricFamily("infaas_h", "histogram", "A histogram.")
    family.add(histogram, app="a")
    family.add(Histogram((1.0,)), app="b")
    found = read(page([family]).text)
    assert found["infaas_h_bucket", (("app", "a"), ("le", "1.0"))] == 1
    assert found["infaas_h_bucket", (("app", "a"), ("le", "2.0"))] == 3
    assert found["infaas_h_bucket", (("app", "a"), ("le", "+Inf"))] == 4
    assert found["infaas_h_count", (("app", "a"),)] == 4
    assert found["infaas_h_sum", (("app", "a"),)] == 12.5
    assert found["infaas_h_count", (("app", "b"),)] == 0


def test_of_too_many_series_the_rest_is_counted() -> None:
    family = MetricFamily("infaas_g", "gauge", "A gauge.")
    for number in range(10):
        family.add(number, app=str(number))
    found = read(page([family], most=4).text)
    assert len([name for name, _ in found if name == "infaas_g"]) == 4
    assert found["infaas_series_left_out", (("metric", "infaas_g"),)] == 6


def test_what_has_no_samples_yet_is_named() -> None:
    assert "# TYPE infaas_g gauge" in page([MetricFamily("infaas_g", "gauge", "A gauge.")]).text


def test_a_label_that_a_series_lacks_is_empty() -> None:
    family = gauge(1, app="a")
    family.add(2, variant="v")
    found = read(page([family]).text)
    assert found == {
        ("infaas_g", (("app", "a"), ("variant", ""))): 1,
        ("infaas_g", (("app", ""), ("variant", "v"))): 2,
    }


def test_pages_of_several_processes_become_one() -> None:
    histogram = MetricFamily("infaas_h", "histogram", "A histogram.")
    histogram.add(Histogram((1.0,)), app="a")
    counter = MetricFamily("infaas_c_total", "counter", "A counter.")
    counter.add(5)
    pages = {"one": page([gauge(1, app="a b"), histogram]).text, 'tw"o': page([gauge(2), histogram, counter]).text}
    body = system_page([counter], pages).text
    found = read(body)
    assert found["infaas_c_total", (("process", "up"),)] == 5
    assert found["infaas_c_total", (("process", 'tw"o'),)] == 5
    assert found["infaas_g", (("app", "a b"), ("process", "one"))] == 1
    assert found["infaas_g", (("process", 'tw"o'),)] == 2
    assert found["infaas_h_count", (("app", "a"), ("process", 'tw"o'))] == 0
    types = [line for line in body.splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == ["# TYPE infaas_c_total counter", "# TYPE infaas_g gauge", "# TYPE infaas_h histogram"]


def test_a_page_of_something_else_is_left_out() -> None:
    pages = {"other": "<html>not {ours</html>\n", "one": page([gauge(1)]).text}
    assert read(system_page([], pages).text) == {("infaas_g", (("process", "one"),)): 1}


def test_who_prefers_openmetrics_gets_it() -> None:
    counter = MetricFamily("infaas_c_total", "counter", "A counter.")
    counter.add(5, app="a")
    histogram = MetricFamily("infaas_h", "histogram", "A histogram.")
    histogram.add(Histogram((1.0,)), app="a")
    one = page([counter, histogram, gauge(0.5)], accept=OPENMETRICS)
    assert one.type.startswith("application/openmetrics-text")
    plain = page([counter, histogram, gauge(0.5)])
    assert plain.type.startswith("text/plain; version=0.0.4")
    assert read(one.text, openmetrics=True) == read(plain.text)
    whole = system_page([counter], {"one": plain.text}, accept=OPENMETRICS)
    assert whole.type == one.type
    assert read(whole.text, openmetrics=True)["infaas_c_total", (("app", "a"), ("process", "one"))] == 5


def test_a_process_that_nobody_asks_does_not_hold_the_library() -> None:
    code = "import sys, services.shell.runtime.serve, services.shell.host.stack; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
