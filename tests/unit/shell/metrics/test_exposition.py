"""Pages that Prometheus' own parser reads back as they were meant."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from services.core.metric import Family, Histogram
from services.shell.metrics.exposition import merge, render


def read(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def gauge(value: float, **labels: str) -> Family:
    family = Family("infaas_g", "gauge", "A gauge.")
    family.add(value, **labels)
    return family


@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e")),
    st.floats(allow_nan=False),
)
def test_whatever_a_label_holds_it_is_read_back(label: str, value: float) -> None:
    assert read(render([gauge(value, app=label)])) == {("infaas_g", (("app", label),)): value}


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    family = Family("infaas_h", "histogram", "A histogram.")
    family.add(histogram, app="a")
    family.add(Histogram((1.0,)))
    found = read(render([family]))
    assert found["infaas_h_bucket", (("app", "a"), ("le", "1"))] == 1
    assert found["infaas_h_bucket", (("app", "a"), ("le", "2"))] == 3
    assert found["infaas_h_bucket", (("app", "a"), ("le", "+Inf"))] == 4
    assert found["infaas_h_count", (("app", "a"),)] == 4
    assert found["infaas_h_sum", (("app", "a"),)] == 12.5
    assert found["infaas_h_count", ()] == 0


def test_of_too_many_series_the_rest_is_counted() -> None:
    family = Family("infaas_g", "gauge", "A gauge.")
    for number in range(10):
        family.add(number, app=str(number))
    found = read(render([family], most=4))
    assert len([name for name, _ in found if name == "infaas_g"]) == 4
    assert found["infaas_series_left_out", (("metric", "infaas_g"),)] == 6


def test_what_has_no_samples_yet_is_named() -> None:
    assert "# TYPE infaas_g gauge" in render([Family("infaas_g", "gauge", "A gauge.")])


def test_pages_of_several_processes_become_one() -> None:
    histogram = Family("infaas_h", "histogram", "A histogram.")
    histogram.add(Histogram((1.0,)), app="a")
    page = merge({"one": render([gauge(1, app="a b"), histogram]), 'tw"o': render([gauge(2), histogram])})
    found = read(page)
    assert found["infaas_g", (("app", "a b"), ("process", "one"))] == 1
    assert found["infaas_g", (("process", 'tw"o'),)] == 2
    assert found["infaas_h_count", (("app", "a"), ("process", 'tw"o'))] == 0
    lines = page.splitlines()
    assert len([line for line in lines if line == "# TYPE infaas_g gauge"]) == 1
    names = [
        line.split("{")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for line in lines
        if line[0] != "#"
    ]
    assert names == sorted(names), "a family's series stand together"
