"""The registrar's edge for models that are registered already: their version is nobody's to reserve, and their kind is kept."""

from msgspec.structs import replace

from bus.codec import decode, encode
from services.core.catalog import key_of
from services.registrar.commands import AddVariants, Claim, Claimed, Finish, Refused, Taken, TakeOver, Work
from tests.support.simulated.registrations import REQUEST, model_record, variant_record
from tests.unit.registrar.test_edge import Place, on_a_bus

WORK = Work(
    registration="fit-1",
    request=replace(REQUEST, registration="fit-1"),
    registrar="a",
    created=1.0,
    version="1",
    hardware="gpu",
)


def test_a_registered_version_is_worked_on_by_one_registrar() -> None:
    async def main(place: Place) -> None:
        await place.catalog.put("model.mlp.1", encode(model_record()))
        assert await place.do(Claim(work=WORK, next_version=2)) == Claimed(WORK)
        assert await place.do(Claim(work=WORK, next_version=2)) == Claimed(WORK)
        other = replace(WORK, registrar="b", created=2.0)
        assert await place.do(Claim(work=other, next_version=2)) == Taken("registration")
        assert await place.keys() == {"model.mlp.1", "work.fit-1"}
        ours = await place.do(TakeOver(registration="fit-1", registrar="b", previous="a"))
        assert ours == replace(WORK, registrar="b")
        assert decode(Work, (await place.status.get("work.fit-1")).value or b"") == ours
        await place.do(Finish(registration="fit-1", model="mlp", version="1", uploads=()))
        assert await place.keys() == {"model.mlp.1"}

    on_a_bus(main)


def test_variants_are_added_to_what_is_registered_and_to_nothing_else() -> None:
    async def main(place: Place) -> None:
        record = variant_record("mlp-v1-trt-fp16-t1-b64", hardware="gpu", framework="trt", precision="fp16")
        command = AddVariants(model="mlp", version="1", variants=(record,))
        refused = await place.do(command)
        assert isinstance(refused, Refused)
        assert "mlp" in refused.message
        assert await place.keys() == set()
        await place.catalog.put("model.mlp.1", encode(model_record()))
        for _ in range(2):
            assert await place.do(command) is None
        assert await place.keys() == {"model.mlp.1", key_of(record)}

    on_a_bus(main)
