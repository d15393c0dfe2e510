from hypothesis import given
from hypothesis import strategies as st

from services.shell.host.supervise import PAUSES, SETTLED, Backoff, describe

lives = st.lists(st.floats(min_value=0, max_value=3 * SETTLED), max_size=30)


def test_deaths_in_a_row_wait_longer_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.after(0.0) for _ in range(len(PAUSES) + 2)] == [*PAUSES, PAUSES[-1], PAUSES[-1]]


def test_a_long_life_starts_the_count_again() -> None:
    backoff = Backoff()
    for _ in PAUSES:
        backoff.after(1.0)
    assert backoff.after(SETTLED) == PAUSES[0]
    assert backoff.after(1.0) == PAUSES[1]


@given(lives)
def test_the_wait_is_the_one_of_the_deaths_since_the_last_long_life(spans: list[float]) -> None:
    backoff, row = Backoff(), 0
    for span in spans:
        row = 0 if span >= SETTLED else row
        assert backoff.after(span) == PAUSES[min(row, len(PAUSES) - 1)]
        row += 1


def test_return_codes_in_words() -> None:
    assert describe(3) == "exit code 3"
    assert describe(-9) == "killed by SIGKILL"
    assert describe(-250) == "killed by signal 250"
