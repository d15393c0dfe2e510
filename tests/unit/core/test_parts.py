from services.shell.host.watch import Missing, SystemPart, missing


def words(*parts: SystemPart, started: bool = True) -> list[str]:
    return [one.what for one in missing(parts, started=started)]


def serves(*parts: SystemPart) -> bool:
    return not any(one.serves for one in missing(parts, started=True))


def test_parts_that_are_well_start_or_are_late_are_no_loss() -> None:
    assert missing([SystemPart(name="a"), SystemPart(name="b", watched=True)], started=True) == []
    assert missing([], started=False) == [Missing("the system: it is starting or stopping", serves=True)]
    # A machine that joins takes nothing away; one that was there, and is started again, does.
    new = SystemPart(name="executor-w3", starting=True, says=None)
    assert words(new)
    assert serves(new)
    assert not serves(SystemPart(name="executor-w0", running=False))
    busy = SystemPart(name="executor-w0", watched=True, says=None)
    assert words(busy) == ["executor-w0: does not answer"]
    assert serves(busy)
    assert not serves(SystemPart(name="executor-w0", says=None))


def test_parts_are_named_with_what_is_wrong_and_optional_ones_stop_none() -> None:
    assert words(
        SystemPart(name="gone", running=False, says=None),
        SystemPart(name="still", silent_s=1.24, says=None),
        SystemPart(name="mute", says=None),
        SystemPart(name="poor", says=("the catalogue", "NATS")),
    ) == ["gone: does not run", "still: silent for 1.2 s", "mute: does not answer", "poor: the catalogue", "poor: NATS"]
    assert serves(
        SystemPart(name="postgres", silent_s=3.0, serves=False),
        SystemPart(name="registrar", running=False, serves=False),
    )
    assert not serves(SystemPart(name="executor", silent_s=3.0))
    assert not serves(SystemPart(name="dispatcher", says=("the catalogue",)))
