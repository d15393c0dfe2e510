"""int8 artifacts of an fp32 ONNX file: weights and activations have fixed scales, taken from samples, so that no answer depends on another.

Settings after measurements on AVX512-VNNI (agreement with fp32, not accuracy alone): static QDQ per channel, unsigned activations and signed
weights, MinMax, full range: 97 % agreement and up to 4.6 times faster; per tensor 77 %, reduced range 84 %. A processor without VNNI cuts
sums of such products off at 16 bits (15 % other classes of a small convolutional net under AVX2). There weights are unsigned, too: exact on
every processor, at half the speed where VNNI is.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from services.executor.backends.base import plain
from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks import onnx_files
from services.executor.workshop.tasks.validation import ValidationSet, calibration

_SYMMETRIC = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "DedicatedQDQPair": True,
    "QuantizeBias": False,
}
INTEGER = frozenset({"QuantizeLinear", "QLinearMatMul", "QLinearConv"})


def static(
    source: Path,
    target: Path,
    data: ValidationSet,
    batch: int,
    tell: Callable[[float], None],
    *,
    symmetric: bool = False,
    exact: bool = True,
) -> None:
    """Weights and activations in int8 (QDQ), calibrated on inputs of the validation set; raises UploadRejected.

    symmetric: signed activations around zero, every tensor with its own pair of nodes and biases left alone, as TensorRT wants it.
    exact: the processor adds products of a signed and an unsigned int8 exactly; else weights are unsigned, too.
    """
    logging.disable(logging.WARNING)
    cleared = _without_value_info(source, target)
    prepared = target.with_suffix(".prepared.onnx")
    try:
        quant_pre_process(str(cleared), str(prepared), skip_symbolic_shape=True)
    except Exception:  # optional: it folds what the exporter has left over
        prepared = cleared
    reader = _Samples(data, batch, tell)
    _quietly(
        lambda: quantize_static(
            str(prepared),
            str(target),
            reader,
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=False,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8 if symmetric or exact else QuantType.QUInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options=_SYMMETRIC if symmetric else None,
        )
    )
    _must_be_integer(target, "no operator that has an int8 form")


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    """Reads the calibration samples, a few at a time."""

    def __init__(self, data: ValidationSet, batch: int, tell: Callable[[float], None]) -> None:
        self._indices = [index for index in calibration(len(data)) if _finite(data.take(np.array([index])))]
        if not self._indices:
            raise UploadRejected(
                "the model cannot be quantised: each sample that would calibrate it holds NaN or infinite values"
            )
        self._data, self._batch, self._tell, self._at = data, batch, tell, 0

    def get_next(self) -> dict[str, Any] | None:
        if self._at >= len(self._indices):
            return None
        some = np.array(self._indices[self._at : self._at + self._batch])
        self._tell(self._at / len(self._indices))
        self._at += self._batch
        return self._data.take(some)


def _finite(inputs: dict[str, Any]) -> bool:
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in inputs.values())


def _without_value_info(source: Path, target: Path) -> Path:
    """Inferred shapes that exporters leave behind are often stale and stop the quantiser."""
    model = onnx.load_model_from_string(source.read_bytes())
    del model.graph.value_info[:]
    cleared = target.with_suffix(".cleared.onnx")
    cleared.write_bytes(model.SerializeToString())
    return cleared


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except UploadRejected:
        raise
    except Exception as error:
        raise UploadRejected(f"the model cannot be quantised: {plain(error)}") from error


def _must_be_integer(target: Path, why: str) -> None:
    model = onnx.load_model_from_string(target.read_bytes())
    if not INTEGER & set(onnx_files.operators(model)):
        raise UploadRejected(f"nothing in this model could be quantised: it has {why}")
