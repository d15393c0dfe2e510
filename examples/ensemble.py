"""Three models answer together and learn from feedback. Needs `infaas up` and `pip install 'infaas[sklearn]'`."""

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

import infaas

APP = "scanned-digits"
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
for model in (LogisticRegression(max_iter=500), RandomForestClassifier(30, random_state=0), GaussianNB()):
    name = type(model).__name__.lower()
    infaas.register(model.fit(x[:1000], y[:1000]), x[1000:1400], y[1000:1400], app=APP, name=name)

with infaas.connect_blocking() as system:
    system.admin("set-selection", app=APP, policy="exp4")
    right = 0
    for picture, label in zip(x[1400:1500], y[1400:1500], strict=True):
        answer = system.query(APP, picture[None], latency_ms=5000)
        right += int(answer.output.argmax() == label)
        system.feedback(APP, int(label), query=answer.query)
    print(f"{right} of 100 right together")
    for row in system.selection(APP):
        print(f"{row['member']}: weight {row['weight']:.2f} after {row['n']} feedbacks")
