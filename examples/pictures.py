"""JPEG files in, the name of a class out, by functions of one's own. Needs `infaas up` and `pip install 'infaas[sklearn,images]'`."""

import io

import numpy as np
from PIL import Image

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def decode(picture: bytes) -> np.ndarray:
    """Runs before the model, in the sandbox, for each picture alone. A ValueError says that the picture is wrong, and not the model."""
    try:
        with Image.open(io.BytesIO(picture)) as image:
            return np.asarray(image.convert("L").resize((8, 8)), "f4").reshape(-1) / 16
    except OSError as error:
        raise ValueError("this is no picture") from error


def name(scores: np.ndarray) -> dict:
    """Runs after it, for each picture's scores."""
    return {"digit": NAMES[scores.argmax()], "score": scores.max()}


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray((pixels * 15).astype("uint8")).resize((64, 64)).save(file, "JPEG")
    return file.getvalue()


if __name__ == "__main__":  # the sandbox runs this file, too, but not from here on
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    import infaas

    digits = load_digits()
    pictures = [jpeg(one) for one in digits.images]
    words = [NAMES[one] for one in digits.target]
    model = LogisticRegression(max_iter=2000).fit([decode(one) for one in pictures[:1400]], digits.target[:1400])
    infaas.register(model, pictures[1400:], words[1400:], app="jpegs", before=decode, after=name)

    with infaas.connect_blocking() as system:
        answer = system.query("jpegs", pictures[1400:1420], latency_ms=5000)
    right = sum(name == word for name, word in zip(answer.labels, words[1400:1420], strict=True))
    print(f"{right} of 20 right, the first is {answer.outputs['digit'][0]}, by {answer.variant}")
