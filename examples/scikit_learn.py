"""A scikit-learn classifier: register it, ask it. Needs `infaas up` and `pip install 'infaas[sklearn]'`."""

from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

import infaas

wine = load_wine()
labels = wine.target_names[wine.target]
x, unseen, y, expected = train_test_split(wine.data, labels, test_size=30, random_state=0)
model = RandomForestClassifier(50, random_state=0).fit(x, y)

# The accuracy of each variant is measured on these samples. Samples that the model has not seen give an honest figure.
infaas.register(model, unseen, expected, app="wine")

with infaas.connect_blocking() as system:
    answer = system.query("wine", unseen.astype("float32"), accuracy=0.9, latency_ms=5000)
right = sum(name == label for name, label in zip(answer.labels, expected, strict=True))
print(f"{right} of {len(expected)} right, by {answer.variant} in {answer.latency_ms:.1f} ms for {answer.cost:.2g} US$")
