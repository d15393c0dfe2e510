"""The client on a real NATS server, against small peers that answer by the contract."""

import asyncio
import subprocess
import sys
import threading

import pytest

import infaas
from bus.natsbus import NatsBus
from tests.support.clients.responders import Responder, answer, refusal, until
from tests.support.servers.nats import NatsServer, free_port


async def serve(url, prefix, behave, what="query.*"):
    bus = await NatsBus.connect(url, name="peer")
    return await Responder(bus, behave).listen(f"{prefix}.{what}")


async def test_a_wrong_password_is_said_without_showing_it(nats_url):
    with pytest.raises(infaas.NotConnected) as caught:
        await infaas.connect(nats_url.replace("secret", "guessed"), timeout=30)
    assert "password" in str(caught.value)
    assert "guessed" not in str(caught.value)


async def test_a_dispatcher_that_starts_late_still_answers(nats_url, prefix):
    async with infaas.connect(nats_url, prefix=prefix) as client:
        query = asyncio.create_task(client.query("a", [[1.0, 2.0]]))
        await until(lambda: client.resent)
        peer = await serve(nats_url, prefix, lambda body, n: answer(body))
        assert (await query).output.tolist() == [3.0]
        assert len({body["retry_key"] for body in peer.heard}) == 1
        await peer.bus.close()


async def test_what_a_dying_dispatcher_had_taken_goes_to_another_under_the_same_key(nats_url, prefix):
    dying = await serve(nats_url, prefix, lambda body, n: None)
    async with infaas.connect(nats_url, prefix=prefix) as client:
        queries = [asyncio.create_task(client.query("a", [[float(i)]])) for i in range(20)]
        await until(lambda: len(dying.heard) >= 20)
        await dying.bus.close()
        other = await serve(nats_url, prefix, lambda body, n: answer(body))
        assert [a.output[0] for a in await asyncio.gather(*queries)] == list(range(20))
    keys = {body["retry_key"] for body in dying.heard}
    assert len(keys) == 20
    assert {body["retry_key"] for body in other.heard} == keys
    await other.bus.close()


async def test_queries_survive_the_death_of_nats(tmp_path):
    server = NatsServer(tmp_path)
    server.start()
    try:
        # The peer answers late, so that the server dies with every answer still to come.
        async with infaas.connect(server.url) as client:
            silent = await serve(server.url, "infaas", lambda body, n: None)
            queries = [asyncio.create_task(client.query("a", [[float(i)]], id=str(i))) for i in range(50)]
            await until(lambda: len(silent.heard) >= 50)
            server.stop(kill=True)
            await silent.bus.close()
            await asyncio.to_thread(server.start)
            peer = await serve(server.url, "infaas", lambda body, n: answer(body))
            assert [a.id for a in await asyncio.gather(*queries)] == [str(i) for i in range(50)]
            await peer.bus.close()
    finally:
        server.stop()


def test_the_blocking_client_serves_many_threads(nats_url, prefix):
    class Peer(threading.Thread):
        """A peer on a loop of its own: the blocking client must not need ours."""

        def __init__(self):
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.up = threading.Event()

        def run(self):
            peer = self.loop.run_until_complete(serve(nats_url, prefix, behave))
            self.up.set()
            self.loop.run_forever()
            self.loop.run_until_complete(peer.bus.close())
            self.loop.close()

    def behave(body, n):
        return refusal("unsatisfiable") if body.get("accuracy") == 1 else answer(body)

    peer = Peer()
    peer.start()
    assert peer.up.wait(60)
    results = {}

    def ask(i):
        results[i] = system.query("a", [[float(i)]]).output[0]

    try:
        with infaas.connect_blocking(nats_url, prefix=prefix) as system:
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == {i: float(i) for i in range(16)}
            with pytest.raises(infaas.Refused, match="unsatisfiable"):
                system.query("a", [[1.0]], accuracy=1)
            assert system.query("a", [[1.0]], accuracy=1, raise_refused=False).code == "unsatisfiable"
        with pytest.raises(infaas.NotConnected):
            system.apps()
        system.close()
    finally:
        peer.loop.call_soon_threadsafe(peer.loop.stop)
        peer.join()


def test_the_blocking_client_leaves_no_thread_when_it_cannot_connect():
    before = set(threading.enumerate())
    with pytest.raises(infaas.NotConnected):
        infaas.connect_blocking(f"nats://127.0.0.1:{free_port()}", timeout=0.3)
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - before


def test_a_program_that_forgets_to_close_still_ends(nats_url, prefix):
    code = f"import infaas; system = infaas.connect_blocking({nats_url!r}, prefix={prefix!r}); print('up')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "up\n")
