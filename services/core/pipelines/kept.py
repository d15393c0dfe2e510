"""The replicas that the leading VM-autoscaler keeps for deployed pipelines, as it writes them into the control bucket. Pure."""

import msgspec

from bus.messages.scaling import PipelineReplicas

_KEYS = "pipeline."  # begin the keys of these records
_decoder = msgspec.msgpack.Decoder(PipelineReplicas)


def replicas_key(pipeline: str) -> str:
    return _KEYS + pipeline


def decode_replicas(value: bytes | None) -> PipelineReplicas | None:
    """The record; None if there is none that can be read."""
    try:
        return _decoder.decode(value) if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class KeptReplicas(dict[str, PipelineReplicas]):
    """By pipeline, from the last entries of the bucket, which has others, too."""

    def change(self, key: str, value: bytes | None) -> None:
        """An entry of the bucket has this value now; None: it is gone."""
        if key.startswith(_KEYS):
            pipeline, state = key.removeprefix(_KEYS), decode_replicas(value)
            if state is not None:
                self[pipeline] = state
            else:
                self.pop(pipeline, None)
