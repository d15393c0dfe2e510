"""What the Open Inference Protocol shows of the catalogue."""

from bus.codec import encode
from bus.messages.catalog import AppRecord, PipelineRecord
from services.core.catalog import Catalog, key_of
from services.gateway.oip.models import ModelTarget, config, find, index, metadata
from tests.support.simulated.fleet import SIGNATURE, catalogue, variant


def known() -> Catalog:
    found = Catalog()
    pipeline = AppRecord(app="twice", links={}, signature=SIGNATURE, pipeline=PipelineRecord(vertices=[]))
    for record in (*catalogue(variant()), pipeline, AppRecord(app="empty", links={})):
        found.apply(key_of(record), encode(record))
    return found


def test_a_pipeline_is_a_model_without_versions() -> None:
    found = find(known(), ModelTarget("twice", None, None, None))
    assert found is not None
    assert metadata(found) == {
        "name": "twice",
        "versions": [],
        "platform": "infaas_pipeline",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
    }
    assert (config(found)["name"], config(found)["max_batch_size"]) == ("twice", 1)
    assert find(known(), ModelTarget("twice", None, None, "1")) is None
    assert find(known(), ModelTarget("twice", "m", None, None)) is None


def test_the_index_has_all_that_may_be_queried() -> None:
    names = [row["name"] for row in index(known(), ready=True)]
    assert names == ["app", "app.m", "app.m.m-v1-ort-fp32-t1-b8", "twice"]


def test_an_app_without_models_is_none() -> None:
    assert find(known(), ModelTarget("empty", None, None, None)) is None
