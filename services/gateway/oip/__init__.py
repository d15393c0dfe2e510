"""The Open Inference Protocol v2, as Triton Inference Server's clients speak it."""
