"""The fleet in sums: what a worker needs of the others is in them, whatever it is itself."""

from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import DeviceStatus, InstanceStatus, State, WorkerHeartbeat
from services.autoscaler.models.supply import OtherWorkers
from services.core.digest import digest_of
from services.core.lifecycle import SERVING, needed
from tests.support.simulated.fleet import variant

NOW = 1000.0
RECORDS = {name: variant(name, hardware=kind) for name, kind in (("a", "cpu"), ("b", "gpu"))}


def beat(
    worker: str, kinds: list[str], instances: list[tuple[str, State, float, bool]], **more: bool
) -> WorkerHeartbeat:
    devices = [
        DeviceStatus(
            device=kind, kind=kind, cores=4, memory_mb=1000.0, memory_used_mb=10.0, cores_used=0.0, utilisation=0.0,
            price_per_hour=1.0,
        )
        for kind in kinds
    ]  # fmt: skip
    return WorkerHeartbeat(
        worker=worker,
        hardware="cpu",
        incarnation=1,
        at=NOW,
        devices=devices,
        instances=[
            InstanceStatus(
                instance=f"{n}.{worker}-{i}",
                variant=n,
                device=RECORDS[n].hardware,
                state=s,
                since=0.0,
                load=x,
                reclaimable=r,
            )
            for i, (n, s, x, r) in enumerate(instances)
            if RECORDS[n].hardware in kinds
        ],
        **more,
    )


beats = st.dictionaries(
    st.sampled_from(["w1", "w2", "w3", "w4"]),
    st.tuples(
        st.lists(st.sampled_from(["cpu", "gpu"]), unique=True, min_size=1),
        st.lists(
            st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["Active", "Overloaded", "Loading", "Unloading"]), st.floats(0, 2000), st.booleans()),
            max_size=4,
        ),
        st.booleans(),
    ),
).map(lambda found: [beat(name, kinds, ones, draining=draining) for name, (kinds, ones, draining) in found.items()])  # fmt: skip


@given(beats)
def test_sums_are_those_of_the_workers_that_take_new_work(found: list[WorkerHeartbeat]) -> None:
    digest, roster = digest_of("d0", found, RECORDS.get, NOW)
    staying = sorted((one for one in found if not one.draining), key=lambda one: one.worker)
    assert digest.workers == len(staying)
    for pool, names in zip(digest.pools, roster.pools, strict=True):
        having = [one.worker for one in staying if any(d.kind == pool.kind for d in one.devices)]
        assert (pool.first, pool.workers, names.workers) == (having[:2], len(having), having)
        assert (pool.cores, pool.memory_mb) == (4.0 * len(having), 1000.0 * len(having))
    for row in digest.variants:
        ours = [(one.worker, i) for one in staying for i in one.instances if i.variant == row.variant and needed(i)]
        roomy = [i for _, i in ours if i.load < 0.8 * RECORDS[row.variant].profile.saturation_qps]
        assert row.holders == sorted({worker for worker, _ in ours})[:2]
        assert row.instances == len(ours)
        assert (row.running, row.serving) == (len(roomy), sum(i.state in SERVING for i in roomy))
        assert row.answering == sum(i.state in SERVING for _, i in ours)
        assert 0 <= row.busy + row.busy_full <= len(ours)
    held = {i.variant for one in staying for i in one.instances if needed(i)}
    assert {row.variant for row in digest.variants} == held


@given(beats, st.sampled_from(["w1", "w2", "w3"]))
def test_who_is_first_without_me(found: list[WorkerHeartbeat], me: str) -> None:
    others = OtherWorkers(me, digest_of("d0", found, RECORDS.get, NOW)[0])
    rest = sorted((one for one in found if not one.draining and one.worker != me), key=lambda one: one.worker)
    for name, record in RECORDS.items():
        holders = [one.worker for one in rest if any(i.variant == name and needed(i) for i in one.instances)]
        assert others.holder([record]) == (holders[0] if holders else None)
        able = [one.worker for one in rest if any(d.kind == record.hardware for d in one.devices)]
        assert others.able([(record.hardware, False)]) == (able[0] if able else None)


def test_without_a_digest_nothing_is_known_of_others() -> None:
    others = OtherWorkers("w1", None)
    assert others.holder(RECORDS.values()) is None and others.able([("cpu", False)]) is None and others.alone
