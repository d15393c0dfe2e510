"""Text in, the name of a class out. Needs `infaas up` and `pip install 'infaas[sklearn]'`."""

import itertools

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import infaas

WORDS = {
    "weather": ["rain", "sun", "wind", "snow", "storm", "clouds"],
    "food": ["soup", "bread", "cheese", "rice", "apples", "salad"],
    "travel": ["train", "flight", "ticket", "hotel", "suitcase", "map"],
}
FORMS = ["there is {} and {} today", "she talks about {} or {}", "we want {} with {}", "no {} without {}"]
texts, topics = [], []
for topic, words in WORDS.items():
    for form, pair in itertools.product(FORMS, itertools.permutations(words, 2)):
        texts.append(form.format(*pair))
        topics.append(topic)
frame = pd.DataFrame({"text": texts})

model = make_pipeline(make_column_transformer((TfidfVectorizer(), "text")), LogisticRegression(C=10)).fit(frame, topics)
infaas.register(model, frame, topics, app="topics")

with infaas.connect_blocking() as system:
    asked = ["no soup without cheese", "we want snow with wind", "she talks about train or hotel"]
    answer = system.query("topics", {"text": np.array(asked).reshape(-1, 1)}, latency_ms=5000)
for text, topic in zip(asked, answer.labels, strict=True):
    print(f"{text}: {topic}")
