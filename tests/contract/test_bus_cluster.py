"""What a connection says to itself comes behind all that any server of a real cluster had got before, however slow the way between servers is."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bus.natsbus import NatsBus
from bus.natsclient import DirectClient
from bus.port import ECHO, Delivery
from tests.support.clients.responders import until
from tests.support.servers.nats import NatsServer, run
from tests.support.servers.nats_cluster import Cluster, cluster

__all__ = ["cluster"]
LONG_S = 1e9


class Heard:
    """A connection to the first server, and what it has heard: notices, and of its own echoes their numbers, with how they came."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.notices: list[bytes] = []
        self.echoes: list[tuple[bytes, str]] = []
        self.before: dict[bytes, list[bytes]] = {}  # by echo that came behind everything: the notices until then
        self.sent = 0

    @classmethod
    async def of(cls, cluster: Cluster) -> "Heard":
        """It knows all servers."""
        heard = cls(await NatsBus.connect(cluster.servers["n1"].url, name="dispatcher"))
        await heard.bus.subscribe("notice", lambda delivery: heard.notices.append(delivery.data))
        await heard.bus.subscribe("echo", heard._echoed)

        def all_known() -> bool:
            heard.echo()
            return heard.bus._behind._servers.keys() == cluster.servers.keys()

        await until(all_known)
        await until(lambda: heard.whole(heard.sent))
        return heard

    def _echoed(self, delivery: Delivery) -> None:
        how = (delivery.headers or {}).get(ECHO, "")
        self.echoes.append((delivery.data, how))
        if not how:
            self.before[delivery.data] = list(self.notices)

    def echo(self) -> int:
        self.sent += 1
        self.bus.publish_behind("echo", b"%d" % self.sent)
        return self.sent

    def came(self, number: int, how: str) -> bool:
        return (b"%d" % number, how) in self.echoes

    def whole(self, number: int) -> bool:
        return self.came(number, "")


def with_two(cluster: Cluster, body: Callable[[Heard, NatsBus], Awaitable[None]]) -> None:
    """One that hears, at the first server, and one that speaks, at the second."""

    async def main() -> None:
        heard, speaker = await Heard.of(cluster), await NatsBus.connect(cluster.servers["n2"].url, name="executor")
        try:
            await body(heard, speaker)
        finally:
            await heard.bus.close()
            await speaker.close()

    run(main())


def test_it_comes_behind_what_is_on_its_way_from_another_server(cluster: Cluster) -> None:
    async def body(heard: Heard, speaker: NatsBus) -> None:
        heard.bus._behind.patience = LONG_S
        cluster.network.cut("n2")
        speaker.publish("notice", b"answered")
        await speaker.flush()  # it has reached its server
        numbers = [heard.echo() for _ in range(5)]
        await until(lambda: all(heard.came(number, "early") for number in numbers))
        await heard.bus.flush()
        assert heard.notices == []
        assert not any(heard.whole(number) for number in numbers)
        cluster.network.heal()
        await until(lambda: all(heard.whole(number) for number in numbers))
        assert heard.before[b"%d" % numbers[0]] == [b"answered"]

    with_two(cluster, body)


def test_of_a_server_that_does_not_answer_for_long_what_it_had_counts_as_lost_and_the_others_are_enough(
    cluster: Cluster,
) -> None:
    async def body(heard: Heard, _: NatsBus) -> None:
        heard.bus._behind.patience = 0.5
        cluster.network.cut("n2")
        first = heard.echo()

        def goes_on() -> bool:
            return any(heard.whole(number) for number in range(first, heard.echo()))

        await until(goes_on)
        assert not heard.whole(first)
        assert any(how == "lost" for _, how in heard.echoes)
        cluster.network.heal()
        await until(lambda: bool(heard.echo()) and "n2" in heard.bus._behind._servers)  # it is asked again

    with_two(cluster, body)


def test_a_server_that_was_restarted_has_lost_what_it_had(cluster: Cluster) -> None:
    async def body(heard: Heard, _: NatsBus) -> None:
        heard.bus._behind.patience = LONG_S
        cluster.servers["n3"].stop(kill=True)
        first = heard.echo()
        await until(lambda: heard.came(first, "early"))
        cluster.servers["n3"].start()
        await until(lambda: bool(heard.echo()) and any(how == "lost" for _, how in heard.echoes))
        assert not heard.whole(first)
        last = heard.echo()
        await until(lambda: heard.whole(last))

    with_two(cluster, body)


@pytest.mark.parametrize("user", ["limited", "tester"])
def test_without_the_right_to_ask_servers_ours_is_heard_alone_and_the_log_says_so_once(
    user: str, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infaas.bus")

    async def main() -> None:
        errors: list[Exception] = []
        url = cluster.servers["n1"].url.replace("tester", user)
        bus = await NatsBus.connect(url, name="dispatcher", on_error=errors.append)
        heard = Heard(bus)
        await bus.subscribe("echo", heard._echoed)
        try:
            for _ in range(3):
                number = heard.echo()
                await until(lambda number=number: heard.whole(number))
            assert errors == []
            assert caplog.text.count("cannot be asked") == (user == "limited")
            if user == "limited":
                assert heard.echoes[-1] == (b"3", "")
                assert not heard.came(3, "early")
        finally:
            await bus.close()

    run(main())


def test_one_server_is_not_asked(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    post = DirectClient.post

    def noted(client: DirectClient, subject: str, *rest: Any, **more: Any) -> None:
        sent.append(subject)
        post(client, subject, *rest, **more)

    monkeypatch.setattr(DirectClient, "post", noted)

    async def main() -> None:
        bus = await NatsBus.connect(nats_server.url, name="dispatcher")
        heard = Heard(bus)
        await bus.subscribe("echo", heard._echoed)
        try:
            number = heard.echo()
            await until(lambda: heard.whole(number))
            assert heard.echoes == [(b"1", "")]
            assert sent == ["echo"]
        finally:
            await bus.close()

    run(main())
