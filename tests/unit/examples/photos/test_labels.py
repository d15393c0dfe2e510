"""The labels of the photographs, and how they are divided."""

import re

from examples.photos import stamps

LABELS = stamps.labels()


def test_labels_are_imagenet_classes_of_pictures() -> None:
    assert len(LABELS) >= 100
    for name, label in LABELS.items():
        assert re.fullmatch(r"[a-z]+(/[A-Za-z0-9_-]+)+\.png", name), name
        assert type(label) is int
        assert 0 <= label < 1000


def test_no_picture_twice() -> None:
    # TOML refuses the same key again; what it does not see is one picture under names that differ in case or mirrored
    plain = [re.sub(r"_mirror", "", name).lower() for name in LABELS]
    assert len(plain) == len(set(plain))
    assert "cartoon" not in "".join(plain)


def test_many_classes_in_both_parts() -> None:
    assert len(set(LABELS.values())) >= 80
    parts = [stamps.part(number) for number in range(len(LABELS))]
    assert parts.count(stamps.VALIDATION) >= 70
    assert parts.count(stamps.UNSEEN) >= 30
    assert set(parts) == {stamps.VALIDATION, stamps.UNSEEN}
