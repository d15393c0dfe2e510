"""Error texts for users, and how a catalogue record is loaded."""

from hypothesis import given
from hypothesis import strategies as st

from services.executor.backends.base import LONGEST_TEXT, plain


@given(st.text(max_size=2000))
def test_a_text_is_one_short_line(text):
    said = plain(RuntimeError(text))
    assert len(said) <= LONGEST_TEXT
    assert "\n" not in said


def test_paths_of_this_machine_are_left_out():
    said = plain("[ONNXRuntimeError] : 1 : FAIL : Load model from /home/me/.cache/x.onnx failed: /src/core/a.cc:12 no")
    assert said == "Load model from … failed: … no"


def test_shapes_and_fractions_are_no_paths():
    assert plain("Got: 3/4 of inputs/outputs") == "Got: 3/4 of inputs/outputs"


def test_an_error_without_a_text_still_says_something():
    assert plain(MemoryError()) == "MemoryError()"
