"""The predictions that feedback may still come for: what each member of an app's selection said, and how likely it was to be asked. Pure."""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from bus.port import Buffer
from services.core.ensemble.base import Member, Outputs
from services.core.release import Arm

# Of predictions, with SIZE for each: a dispatcher's memory stays below 300 MB. At 1,000 queries/s of five members with ten classes,
# feedback of the last 50 s is joined; what comes later is evaluated again.
MOST_BYTES = 64 * 2**20
SIZE = 1000  # bytes of a prediction beside its arrays and its labels, measured
EQUAL = 16  # predictions for equal inputs among which the one that a feedback is for is looked for


def digest_of(inputs: Buffer) -> bytes:
    """16 bytes of a query's raw field `inputs`. It is this system's own: a client's `input_digest` could name another client's inputs."""
    return blake2b(inputs, digest_size=16).digest()


def uid_of(text: str) -> bytes:
    """Of a query by its name; b"" if that is none."""
    try:
        uid = bytes.fromhex(text)
    except ValueError:
        return b""
    return uid if len(uid) == 16 and len(text) == 32 else b""


class Claim(NamedTuple):
    """What those reach together that made an answer, by what is known of each. least: promised of a query that states nothing. product: the mean score at
    registration. by: the name of its scores: a pipeline's as in `AppQuality`, an ensemble's by its variants' twins. metric, classes: of its outputs.
    """

    least: float
    product: float
    by: str
    metric: str
    classes: list[str]


@dataclass(slots=True, eq=False)
class Prediction:
    """What the members of an app said about one query. at: Unix seconds.

    id: of the client. digest: `digest_of` its inputs; None if they were too large for a message. members: all of the selection, asked or
    not. p: by model, the probability that it is asked. outputs: by model, of those that have answered, by output name; the first axis is
    the items. variants: by model, who gave them. answer: that was made of them; claim: by whom. floor: the accuracy that the query stated. fed: items that
    feedback has come for here; counted: of them, those for which one has counted. of: of a pipeline's answer, which has no members, the prediction
    of the stage that made it, or why no policy can learn from it. arm: the version that answered in a release.
    """

    uid: bytes
    app: str
    context: str | None
    digest: bytes | None
    at: float
    members: Sequence[Member]
    p: Mapping[str, float]
    outputs: dict[str, Outputs]
    items: int = 1
    id: str | None = None
    of: "Prediction | str | None" = None
    variants: dict[str, str] = field(default_factory=dict)
    answer: Outputs | None = None
    claim: Claim | None = None
    floor: float | None = None
    fed: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    arm: Arm | None = None
    labelled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = dict(self.outputs)

    @property
    def size(self) -> int:
        """Bytes."""
        labels = SIZE + sum(4 * len(text) for text in (self.id, self.context) if text is not None)  # UTF-32 at most
        return labels + sum(array.nbytes for outputs in self.outputs.values() for array in outputs.values())

    def of_item(self, item: int) -> dict[str, Outputs]:
        """The outputs for one item, by model; the first axis has length 1."""
        return {
            model: {name: array[item : item + 1] for name, array in outputs.items()}
            for model, outputs in self.outputs.items()
        }


_Same = tuple[str, bytes | None, str | bool | None]  # app, digest, context; False: whatever the context


class Predictions:
    """The last predictions. The oldest go first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._by_uid: OrderedDict[bytes, Prediction] = OrderedDict()
        self._same: dict[_Same, dict[bytes, None]] = {}
        self._by_id: dict[tuple[str, str], list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def add(self, prediction: Prediction) -> None:
        """A query has been answered. One that was answered before, and is again, replaces its prediction."""
        self._remove(prediction.uid)
        uid = prediction.uid
        self._by_uid[uid] = prediction
        self.bytes += prediction.size
        if prediction.digest is not None:
            for key in _same(prediction):
                self._same.setdefault(key, {})[uid] = None
        if prediction.id is not None:
            self._by_id.setdefault((prediction.app, prediction.id), []).append(uid)
        while self._by_uid and self.bytes > self._most_bytes:
            self._remove(next(iter(self._by_uid)))

    def late(self, uid: bytes, model: str, outputs: Outputs, variant: str = "") -> None:
        """A member has answered after its query: feedback teaches about it all the same."""
        prediction = self._by_uid.get(uid)
        if prediction is None or model in prediction.outputs:
            return
        self.bytes -= prediction.size
        prediction.outputs[model], prediction.variants[model] = outputs, variant
        self.bytes += prediction.size
        while self._by_uid and self.bytes > self._most_bytes:
            self._remove(next(iter(self._by_uid)))

    def forget(self, known: Container[str]) -> None:
        """Apps were deleted: no feedback comes for others than these."""
        for uid in [uid for uid, one in self._by_uid.items() if one.app not in known]:
            self._remove(uid)

    def by_query(self, app: str, uid: bytes) -> Prediction | None:
        """The prediction with this uid, if it is this app's."""
        found = self._by_uid.get(uid)
        return found if found is not None and found.app == app else None

    def by_inputs(self, app: str, digest: bytes, context: str | bool | None, item: int) -> Prediction | None:
        """The latest prediction for these inputs in this context, of several one that had no feedback for the item yet.

        context: False: in whichever.
        """
        uids = self._same.get((app, digest, context))
        if not uids:
            return None
        latest = [self._by_uid[uid] for uid in islice(reversed(uids), EQUAL)]
        return next((prediction for prediction in latest if item not in prediction.fed), latest[0])

    def by_id(self, app: str, id: str, digest: bytes | None, context: str | None) -> Prediction | None:
        """The latest prediction for a query with the client's id, with these inputs, in this context. None: in whichever, with whichever.

        Clients of HTTP name a query by what its answer named, where they have one field for both.
        """
        latest = [self._by_uid[uid] for uid in islice(reversed(self._by_id.get((app, id), [])), EQUAL)]
        for one in latest:
            if (digest is None or one.digest == digest) and (context is None or one.context == context):
                return one
        return self.by_query(app, uid_of(id))

    def _remove(self, uid: bytes) -> None:
        prediction = self._by_uid.pop(uid, None)
        if prediction is None:
            return
        self.bytes -= prediction.size
        for key in _same(prediction) if prediction.digest is not None else ():
            same = self._same[key]
            del same[uid]
            if not same:
                del self._same[key]
        if prediction.id is not None:
            same_id = self._by_id[prediction.app, prediction.id]
            same_id.remove(uid)
            if not same_id:
                del self._by_id[prediction.app, prediction.id]


def _same(prediction: Prediction) -> tuple[_Same, _Same]:
    app, digest = prediction.app, prediction.digest
    return (app, digest, prediction.context), (app, digest, False)
