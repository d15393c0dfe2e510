"""Pages of the dashboard as a visitor sees them, without a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit
from streamlit.testing.v1 import AppTest

from bus.login import SystemAddress
from dashboard.serve import set_system_address
from tests.support.servers.nats import free_port

APP = Path(__file__).parents[3] / "dashboard" / "app.py"
PAGES = tuple(sorted(path.stem for path in (APP.parent / "views").glob("[a-z]*.py")))
NOWHERE = f"nats://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module", autouse=True)
def looking() -> Iterator[None]:
    """Nothing of it is left for other tests."""
    yield
    streamlit.cache_data.clear()
    streamlit.cache_resource.clear()
    set_system_address(None)


def page(name: str, dsn: str, **query: str) -> AppTest:
    """The page as a visitor with this address sees it first."""
    set_system_address(SystemAddress(NOWHERE, dsn))
    test = AppTest.from_file(str(APP), default_timeout=120)
    for key, value in query.items():
        test.query_params[key] = value
    return test.run() if name == "overview" else test.switch_page(f"views/{name}.py").run()


def sound(name: str, dsn: str, **query: str) -> AppTest:
    """The page, on which nothing failed and no error is told."""
    test = page(name, dsn, **query)
    assert not test.exception and not test.error
    return test


def text(test: AppTest) -> str:
    """Everything that is told in words."""
    told = [*test.markdown, *test.caption, *test.info, *test.error, *test.warning, *test.success]
    return "\n".join(str(each.value) for each in told)


def metric(test: AppTest, label: str) -> tuple[str, str]:
    found = next(each for each in test.metric if each.label == label)
    return str(found.value), str(found.delta)


def table(test: AppTest, column: str) -> Any:
    """The first table that has this column."""
    return next(each.value for each in test.dataframe if column in each.value)
