"""Which accuracy a query gets that states none: that of its model, as it was uploaded.

A variant answers as its model does if its accuracy is at most FLOOR below the model's own. For errors (mae, rmse): if its error is at most
FLOOR of it larger, and all answers but a share of FLOOR agree with the model's. A variant of a model of unknown accuracy does, too.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from bus.messages.catalog import ERRORS, AppRecord, VariantRecord
from services.core.cost import merit

FLOOR = 0.005
NOISE = 1e-6  # of a computed accuracy

Default = Literal[
    "own", "any"
]  # of an app: what a query without an accuracy gets: its model's own answers, or any variant's
DEFAULTS: tuple[Default, ...] = get_args(Default)


def floor_of(record: VariantRecord) -> float:
    """The least accuracy of a variant that answers as its model does; 0.0 if the model's own is not known."""
    own = record.model_accuracy
    if not own:
        return 0.0
    if record.metric in ERRORS:
        return 1.0 / (1.0 + (1.0 / own - 1.0) * (1.0 + FLOOR)) - NOISE
    return own - FLOOR - NOISE


def answers_as_model(record: VariantRecord) -> bool:
    """Whether this variant answers as its model does."""
    agrees = record.metric not in ERRORS or record.agreement is None or record.agreement >= 1.0 - FLOOR
    return agrees and (record.accuracy is None or record.accuracy >= floor_of(record))


def defaults(records: Sequence[VariantRecord], app: AppRecord | None) -> list[bool]:
    """Of each of an app's variants, whether a query that states no accuracy may get it. Where none of a model's does, its best ones serve."""
    if app is not None and app.accuracy == "any":
        return [True] * len(records)
    best: dict[tuple[str, str], float] = {}
    as_model = [answers_as_model(record) for record in records]
    for record, kept in zip(records, as_model, strict=True):
        version = (record.model, record.version)
        best[version] = max(best.get(version, 0.0), float("inf") if kept else merit(record.accuracy))
    return [
        kept or merit(record.accuracy) >= best[record.model, record.version]
        for record, kept in zip(records, as_model, strict=True)
    ]


def meeting(
    records: Iterable[VariantRecord], accuracy: float, app: AppRecord | None, *, named: bool = False
) -> tuple[VariantRecord, ...]:
    """The variants of an app that meet a query's accuracy; 0.0: it states none. named: the query names its variant, which is enough.

    records: all of the versions that may answer. A variant whose accuracy was not measured meets every one.
    """
    pool = tuple(records)
    if accuracy > 0.0:
        return tuple(record for record in pool if record.accuracy is None or record.accuracy >= accuracy)
    if named:
        return pool
    return tuple(record for record, serves in zip(pool, defaults(pool, app), strict=True) if serves)
