"""Stamps become square pictures; what is missing is named with its remedy."""

from pathlib import Path

import numpy as np
import pytest

from examples.photos import files, stamps
from infaas.errors import InfaasError


def test_every_picture_in_every_view(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra photos")
    for name in stamps.labels():
        path = tmp_path / stamps.INSTALLED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = np.zeros((20, 40, 4), np.uint8)
        stamp[:, :20] = [255, 0, 0, 255]  # red on the left, nothing on the right
        image.fromarray(stamp).save(path)
    directory = stamps.found(tmp_path)
    assert directory is not None
    read = stamps.read(directory)
    n, views = len(stamps.labels()), len(stamps.VIEWS)
    assert read["x"].shape == (n * views, stamps.SIDE, stamps.SIDE, 3)
    assert read["x"].dtype == np.uint8
    assert (read["y"].reshape(n, views) == read["y"][::views, None]).all()
    assert (read["part"].reshape(n, views) == read["part"][::views, None]).all(), "views of one picture in two parts"
    plain, mirrored = read["x"][:2]
    assert plain[130, 60].tolist() == mirrored[130, 200].tolist() == [255, 0, 0]
    assert plain[130, 200].tolist() == [255] * 3
    assert mirrored[130, 60].tolist() == [160] * 3


def test_one_missing_picture_is_noticed(tmp_path: Path) -> None:
    for name in list(stamps.labels())[1:]:
        path = tmp_path / stamps.INSTALLED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert stamps.found(tmp_path) is None


def test_without_the_tools_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfaasError, match=r"without apt-get: .*--stamps DIRECTORY"):
        stamps.fetch(tmp_path, str(tmp_path))


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    for name, text in (("apt-get", "echo E: no such package >&2; exit 100"), ("dpkg-deb", "exit 0")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    with pytest.raises(
        InfaasError, match=r"apt-get download tuxpaint-stamps-default failed: E: no such package.*apt-get install"
    ):
        stamps.fetch(tmp_path, str(tmp_path))


def test_missing_packages_are_named() -> None:
    with pytest.raises(InfaasError, match=r"extra `photos` \(no_such_network missing\): pip install"):
        files.require_packages(["numpy", "no_such_network"])


def test_files_are_ready_only_when_whole_and_current(tmp_path: Path) -> None:
    assert not files.ready(tmp_path)
    for name in (files.PICTURES, *(f"{name}.onnx" for name in files.MODELS)):
        (tmp_path / name).touch()
    assert not files.ready(tmp_path)
    (tmp_path / files.MADE).write_text("other labels")
    assert not files.ready(tmp_path)
    (tmp_path / files.MADE).write_text(files.made_from())
    assert files.ready(tmp_path)
    (tmp_path / f"{files.MODELS[1]}.onnx").unlink()
    assert not files.ready(tmp_path)
