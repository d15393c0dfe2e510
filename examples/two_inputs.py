"""A regression on two inputs, a number and a text. Needs `infaas up` and `pip install 'infaas[sklearn]' pandas`."""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import infaas

random = np.random.default_rng(0)
homes = pd.DataFrame({"area": random.uniform(20, 120, 500), "town": random.choice(["Delft", "Ghent", "Lille"], 500)})
rent = 300 + 9 * homes["area"] + homes["town"].map({"Delft": 250, "Ghent": 100, "Lille": 0}) + random.normal(0, 20, 500)

columns = make_column_transformer((OneHotEncoder(), ["town"]), remainder="passthrough")
model = make_pipeline(columns, GradientBoostingRegressor(random_state=0)).fit(homes[:400], rent[:400])

# Each column is an input of its own. Labels that are no whole numbers are targets: the metric is the mean error.
infaas.register(model, homes[400:], rent[400:], app="rent")

with infaas.connect_blocking() as system:
    asked = {"area": np.array([[50.0], [100.0]], "float32"), "town": np.array([["Delft"], ["Lille"]])}
    answer = system.query("rent", asked, mae=60, latency_ms=5000)  # at most 60 wrong on average
for area, town, found in zip(asked["area"].ravel(), asked["town"].ravel(), answer.output.ravel(), strict=True):
    print(f"{area:.0f} m2 in {town}: {found:.0f}")
