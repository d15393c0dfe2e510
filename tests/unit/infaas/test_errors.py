import pytest

from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout


def test_a_refusal_keeps_all_it_was_told():
    told = {
        "id": "q1",
        "error": {
            "code": "unsatisfiable",
            "message": "no variant is that accurate",
            "closest": {"variant": "v", "accuracy": 0.9, "latency_ms": 3.0, "cost": 0.1},
            "retry_after_ms": 20.0,
        },
    }
    refused = Refused.from_map(told)
    assert (refused.code, refused.message, refused.id) == ("unsatisfiable", "no variant is that accurate", "q1")
    assert refused.closest == told["error"]["closest"]
    assert refused.retry_after_ms == 20.0
    assert refused.to_map() == told
    assert str(refused) == "unsatisfiable: no variant is that accurate"


def test_a_code_of_a_later_version_is_kept():
    assert Refused.from_map({"error": {"code": "on_holiday", "message": "later"}}).code == "on_holiday"


@pytest.mark.parametrize("error", [None, "no", 7, []])
def test_a_refusal_without_a_reason_still_is_one(error):
    assert Refused.from_map({"error": error}).code == "bad_reply"


def test_all_errors_are_infaas_errors_and_what_python_calls_them():
    for error, python in ((NotConnected, ConnectionError), (Timeout, TimeoutError), (BadInput, ValueError)):
        assert issubclass(error, InfaasError)
        assert issubclass(error, python)
