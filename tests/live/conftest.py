"""Fixtures of tests against whole systems, and which of these tests belong to `make test`: each way through all of it once."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import infaas
from tests.support.clients.stock import nc
from tests.support.gateways.curl import place
from tests.support.servers.ensembles import ensembles
from tests.support.servers.pipelines import pipelines
from tests.support.servers.system import doubled

__all__ = ["doubled", "ensembles", "nc", "pipelines", "place"]

# What is not named here is slow. Those of the whole system come first; the others start one server or one process.
CROSSINGS = {
    "test_stock_client.py": ("test_right_answers", "test_a_query_sent_again_under_its_key_is_the_same_query"),
    "test_stock_bad_input.py": ("test_refusals_and_answers_are_in_the_record",),
    "test_system_client.py": ("test_right_answers_to_many_at_once", "test_the_blocking_client"),
    "test_gateway_rest.py": ("test_what_clients_did_wrong_is_counted_once_wherever_it_was_found",),
    "test_gateway_grpc.py": ("test_real_answers_by_app_model_and_variant",),
    "test_gateway_access.py": ("test_every_verb_with_every_token",),
    "test_gateway_rest_dialects.py": ("test_a_selection_is_set_over_http_and_a_wrong_one_refused",),
    "test_metrics.py": ("test_what_happened_is_counted", "test_rules_and_dashboard_name_what_there_is"),
    "test_dashboard.py": ("test_a_system_has_one_and_says_where",),
    "test_replay.py": ("test_the_recent_past_of_an_app_and_a_pipeline_of_a_real_system",),
    "test_containers.py": ("test_a_closure_a_fitted_object_and_an_onnx_session_answer_the_same_queries",),
    "test_faults.py": ("test_the_only_executor_is_killed",),
    "test_client.py": ("test_what_a_dying_dispatcher_had_taken_goes_to_another_under_the_same_key",),
    "test_commands.py": ("test_query_prints_the_answer", "test_a_refused_query_exits_1_with_the_offer"),
    "test_registrar.py": ("test_a_model_becomes_measured_variants",),
    "test_serve.py": ("test_it_is_asked_like_a_system",),
    "test_recorder.py": ("test_every_kind_of_event_is_in_sql_and_done_with",),
    "test_worker.py": ("test_a_draining_worker_answers_what_it_has_and_loads_nothing",),
    "test_workshop.py": ("test_orders_are_carried_out_one_after_the_other",),
    "test_embedded_nats.py": ("test_what_was_acknowledged_survives_kill_9_and_the_url_stays",),
    "test_embedded_postgres.py": ("test_what_was_committed_survives_kill_9",),
    "test_supervise.py": ("test_a_killed_child_is_reported_and_restarted",),
}


@pytest.fixture
def client(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[infaas.Client]:
    """A client of the system that the test is about."""
    name = next(one for one in ("pipelines", "ensembles", "system") if one in request.fixturenames)
    return infaas.connect(request.getfixturevalue(name).nats)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where no slow test runs, a file of slow ones is not even read."""
    if "not slow" in config.option.markexpr and collection_path.match("test_*.py"):
        return collection_path.name not in CROSSINGS or None
    return None


def pytest_itemcollected(item: pytest.Function) -> None:
    if item.originalname not in CROSSINGS.get(item.path.name, ()):
        item.add_marker("slow")
