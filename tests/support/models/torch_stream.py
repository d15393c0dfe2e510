"""A device stream of torch programs without a GPU: the same steps on the CPU, for the logic around CUDA graphs."""

from contextlib import contextmanager


class CpuStream:
    """What it records computes anew into the same outputs. refuse: nothing can be recorded."""

    pinned = False

    def __init__(self, torch, refuse=False):
        self.torch, self.device, self.refuse = torch, torch.device("cpu"), refuse
        self.recorded = self.replayed = 0

    @contextmanager
    def on(self):
        with self.torch.inference_mode():
            yield

    def capture(self, compute):
        if self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")
        outputs = compute()
        self.recorded += 1

        def replay():
            self.replayed += 1
            for old, new in zip(outputs, compute(), strict=True):
                old.copy_(new)

        return replay, outputs

    def wait(self):
        return

    def forget(self):
        return

    def trim(self):
        return
