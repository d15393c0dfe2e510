from services.core.parts import Missing, Part, missing


def words(*parts: Part, started: bool = True) -> list[str]:
    return [one.what for one in missing(parts, started=started)]


def serves(*parts: Part) -> bool:
    return not any(one.serves for one in missing(parts, started=True))


def test_a_system_whose_parts_are_well_is_ready() -> None:
    assert missing([Part(name="a"), Part(name="b", watched=True)], started=True) == []
    assert missing([], started=False) == [Missing("the system: it is starting or stopping", serves=True)]


def test_each_part_is_named_with_what_is_wrong() -> None:
    assert words(
        Part(name="gone", running=False, says=None),
        Part(name="still", silent_s=1.24, says=None),
        Part(name="mute", says=None),
        Part(name="poor", says=("the catalogue", "NATS")),
    ) == ["gone: does not run", "still: silent for 1.2 s", "mute: does not answer", "poor: the catalogue", "poor: NATS"]


def test_what_queries_do_not_need_stops_none() -> None:
    assert serves(
        Part(name="postgres", silent_s=3.0, serves=False), Part(name="registrar", running=False, serves=False)
    )
    assert not serves(Part(name="executor", silent_s=3.0))
    assert not serves(Part(name="dispatcher", says=("the catalogue",)))


def test_a_part_that_starts_for_the_first_time_is_no_loss() -> None:
    """A machine that joins takes nothing away; one that was there, and is started again, does."""
    new = Part(name="executor-w3", starting=True, says=None)
    assert words(new)
    assert serves(new)
    assert not serves(Part(name="executor-w0", running=False))


def test_a_page_that_comes_late_is_no_loss_while_the_loop_turns() -> None:
    busy = Part(name="executor-w0", watched=True, says=None)
    assert words(busy) == ["executor-w0: does not answer"]
    assert serves(busy)
    assert not serves(Part(name="executor-w0", says=None))
