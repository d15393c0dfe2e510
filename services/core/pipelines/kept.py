"""The replicas that the leading VM-autoscaler keeps for deployed pipelines, as it writes them into the control bucket. Pure."""

from bus.codec import decode_kept
from bus.messages.scaling import PipelineReplicas

_KEYS = "pipeline."  # begin the keys of these records


def replicas_key(pipeline: str) -> str:
    return _KEYS + pipeline


class KeptReplicas(dict[str, PipelineReplicas]):
    """By pipeline, from the last entries of the bucket, which has others, too."""

    def change(self, key: str, value: bytes | None) -> None:
        """An entry of the bucket has this value now; None: it is gone."""
        if key.startswith(_KEYS):
            pipeline, state = key.removeprefix(_KEYS), decode_kept(PipelineReplicas, value)
            if state is not None:
                self[pipeline] = state
            else:
                self.pop(pipeline, None)
