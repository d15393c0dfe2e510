"""Text in, the name of a class out, cleaned by a function of one's own. Needs `infaas up` and `pip install 'infaas[sklearn]'`."""

import itertools
import re

WORDS = {
    "weather": ["rain", "sun", "wind", "snow", "storm", "clouds"],
    "food": ["soup", "bread", "cheese", "rice", "apples", "salad"],
    "travel": ["train", "flight", "ticket", "hotel", "suitcase", "map"],
}
FORMS = ["There is {} and {} today.", "She talks about {} or {}!", "We want {} with {}?", "No {} without {}."]


def clean(text: str) -> str:
    """Runs before the model, in the sandbox, for each text alone."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))


if __name__ == "__main__":  # the sandbox runs this file, too, but not from here on
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    import infaas

    texts, topics = [], []
    for topic, words in WORDS.items():
        for form, pair in itertools.product(FORMS, itertools.permutations(words, 2)):
            texts.append(form.format(*pair))
            topics.append(topic)

    model = make_pipeline(TfidfVectorizer(lowercase=False), LogisticRegression(C=10)).fit(map(clean, texts), topics)
    infaas.register(model, texts, topics, app="topics", before=clean)

    with infaas.connect_blocking() as system:
        asked = ["NO SOUP, without cheese!", "we want: snow with wind", "(she talks about train or hotel)"]
        answer = system.query("topics", asked, latency_ms=5000)
    for text, topic in zip(asked, answer.labels, strict=True):
        print(f"{text}: {topic}")
