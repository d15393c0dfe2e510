"""A torch module: register it, ask it. Needs `infaas up` and `pip install 'infaas[torch]'`."""

import numpy as np
import torch

import infaas

random = np.random.default_rng(0)
pictures = random.random((600, 1, 8, 8), dtype=np.float32)
labels = (pictures[:, 0, :, :4].mean(axis=(1, 2)) < pictures[:, 0, :, 4:].mean(axis=(1, 2))).astype(
    "int64"
)  # lighter side

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 64, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x, y = torch.from_numpy(pictures[:400]), torch.from_numpy(labels[:400])
for _ in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

infaas.register(model, pictures[400:], labels[400:], app="lighter-side")

with infaas.connect_blocking() as system:
    answer = system.query("lighter-side", pictures[400:410], latency_ms=5000)
right = answer.output.argmax(axis=1) == labels[400:410]
print(f"{right.sum()} of {len(right)} right, by {answer.variant} (accuracy {answer.accuracy:.3f})")
