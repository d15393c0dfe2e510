"""The catalogue in SQL as the records that it mirrors. What a replay does not need (artifacts, default answers) stays out."""

from typing import Any

import msgspec
import psycopg

from bus.messages.catalog import AppRecord, Profile, ProfileRow, VariantRecord
from services.simulation.scenario.catalogue import SIGNATURE

Connection = psycopg.Connection[Any]
RECORDED = "recorded"  # in place of what is not needed


def apps_of(connection: Connection) -> list[AppRecord]:
    """All apps."""
    rows = connection.execute("SELECT app, versions, latency_ms, min_instances FROM apps ORDER BY app")
    return [
        AppRecord(app=app, links=dict(versions), signature=SIGNATURE, latency_ms=latency, min_instances=least)
        for app, versions, latency, least in rows
    ]


def variants_of(connection: Connection, apps: set[str], notes: list[str]) -> list[VariantRecord]:
    """Those that serve these apps, with their profiles. Inputs are not recorded, so all count as one byte an item."""
    profiles: dict[str, list[ProfileRow]] = {}
    disturbed: set[str] = set()
    for variant, batch, length, p50, p99, cpu, ratio, flag in connection.execute(
        "SELECT variant, batch, length, p50_ms, p99_ms, cpu_ms, wall_over_cpu, disturbed FROM profiles"
        " ORDER BY variant, length, batch"
    ):
        row = ProfileRow(batch=batch, p50_ms=p50, p99_ms=p99, cpu_ms=cpu, wall_over_cpu=ratio, length=length)
        profiles.setdefault(variant, []).append(row)
        if flag:
            disturbed.add(variant)
    found, without = [], []
    for row in connection.execute(
        "SELECT DISTINCT ON (variant) variant, model, version, hardware, framework, precision, threads, max_batch, accuracy,"
        " agreement, load_ms, memory_mb, saturation_qps, batching, provenance, dominated, simulated, attributes"
        " FROM variants WHERE app = ANY (%s) ORDER BY variant",
        (sorted(apps),),
    ):
        name, model, version, hardware, framework, precision, threads, largest, accuracy, agreement, *rest = row
        load_ms, memory_mb, saturation, batching, provenance, dominated, simulated, attributes = rest
        if name not in profiles:
            without.append(name)
            continue
        profile = Profile(
            rows=profiles[name],
            load_ms=load_ms,
            memory_mb=memory_mb,
            saturation_qps=saturation,
            provenance=provenance,
            disturbed=name in disturbed,
        )
        found.append(
            VariantRecord(
                variant=name,
                model=model,
                version=version,
                framework=framework,
                precision=precision,
                threads=max(1, threads),
                max_batch=largest,
                hardware=hardware,
                artifact=RECORDED,
                format=RECORDED,
                accuracy=accuracy,
                agreement=agreement,
                profile=profile,
                signature=SIGNATURE,
                dominated=dominated,
                simulated=simulated,
                batching=batching,
                attributes=msgspec.convert(attributes, dict[str, str]),
            )
        )
    if without:
        notes.append(f"nothing was measured of {', '.join(without[:3])}: left out")
    return found


def prices_of(connection: Connection) -> dict[str, float]:
    """US$ per hour by kind of device, as they are now."""
    return dict(connection.execute("SELECT hardware, price_per_hour FROM prices").fetchall())
