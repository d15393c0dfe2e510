"""How long a system takes to its first answer, and how much memory it holds: `python benches/startup.py [--seconds S] [--rounds N]`.

Starts a system, registers the benches' model, stops it; then starts it again on the same directory and asks from the first moment
on. Wanted: at most 1.5 s from `infaas up` to the first answer, and at most 220 MB for everything (proportional set size: pages that
processes share count once) while it is idle; after a load it is told, too.
"""

import asyncio
import statistics
import time
from pathlib import Path

import rig

import infaas
from infaas.errors import InfaasError, Refused

PATIENCE = 60.0  # s for the first answer


async def first_answer(own: rig.DemoSystem) -> tuple[float, float]:
    """Seconds from the start to `ready`, and to the first answer to someone who asks all the time."""
    x, _ = rig.stored()
    began = time.monotonic()
    starting = asyncio.create_task(own.start())
    while time.monotonic() - began < PATIENCE:
        try:
            async with infaas.connect(data_dir=own.data_dir, timeout=1.0) as client:
                while time.monotonic() - began < PATIENCE:
                    reply = await client.query(rig.APP, x[:1], timeout=0.5, raise_refused=False)
                    if not isinstance(reply, Refused):
                        took = time.monotonic() - began
                        return await starting, took
                    await asyncio.sleep(0.02)
        except InfaasError:
            if starting.done():
                starting.result()
            await asyncio.sleep(0.05)
    raise InfaasError(f"no answer within {PATIENCE:.0f} s")


def show_memory(title: str, found: dict[str, float]) -> None:
    parts = ", ".join(f"{kind} {mb:.0f}" for kind, mb in sorted(found.items(), key=lambda each: -each[1]))
    print(f"{title:22} {sum(found.values()):6.0f} MB   wanted: at most 220 idle   ({parts})")


def main() -> None:
    parser = rig.parser(__doc__, seconds=3.0, rounds=3)  # of load before memory is measured again; second starts
    parser.add_argument("--fused", action="store_true", help="a system whose queries stay in one process")
    options = parser.parse_args()
    with rig.system(fused=options.fused, start=False) as own:
        print(f"first start to ready   {asyncio.run(own.start()):6.1f} s")
        asyncio.run(rig.prepare(own.data_dir))
        own.stop()
        times = []
        for number in range(options.rounds):
            times.append(asyncio.run(first_answer(own)))
            if number < options.rounds - 1:
                own.stop()
        ready, answer = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"second start to ready  {ready:6.1f} s")
        print(
            f"       to first answer {answer:6.1f} s    wanted: at most 1.5   (each: {', '.join(f'{a:.1f}' for _, a in times)})"
        )
        time.sleep(1.0)
        show_memory("memory, idle", rig.memory(own.pid))
        x, y = rig.stored()
        queries = rig.bodies(Path(own.data_dir.parent) / "queries.npz", x[:64], y[:64])
        load = ("--closed", "64", "--seconds", str(options.seconds), "--unchecked")
        rig.generate("nats", own.urls["nats"], f"infaas.query.{rig.APP}", queries, *load)
        show_memory("memory, after a load", rig.memory(own.pid))


if __name__ == "__main__":
    main()
