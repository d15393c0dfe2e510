"""Which version of which model serves an app, where variants of one model serve different apps.

An app links a model in one version, and is served by all its variants. So variants that serve the same apps make one version,
and those that serve altogether other apps another one. Where the apps overlap (A serves one, B serves one and two) the
model is split: its second part is called <model>-2, and is a model of its own for whoever names models.
"""

from typing import NamedTuple

from msgspec.structs import replace

from bus.messages.catalog import VariantRecord


class Entry(NamedTuple):
    """A variant and the apps that it serves."""

    record: VariantRecord
    apps: frozenset[str]


class Linked(NamedTuple):
    """models: (name, version). variants: with the names and versions of theirs, in the order given. links: app to model to version."""

    models: tuple[tuple[str, str], ...]
    variants: tuple[VariantRecord, ...]
    links: dict[str, dict[str, str]]


def link(entries: list[Entry]) -> Linked:
    """Every app is linked to all its variants, and to no others."""
    names = {entry.record.model for entry in entries}
    parts: dict[str, list[list[frozenset[str]]]] = {}  # of a model: its parts, each a list of versions' apps
    called: dict[tuple[str, int], str] = {}
    models: dict[tuple[str, str], None] = {}
    variants: list[VariantRecord] = []
    links: dict[str, dict[str, str]] = {}
    for record, apps in entries:
        of_model = parts.setdefault(record.model, [])
        part = _part(of_model, apps)
        name = called.get((record.model, part))
        if name is None:
            name = called[record.model, part] = _free(record.model, part, names)
            names.add(name)
        version = str(of_model[part].index(apps) + 1)
        models[name, version] = None
        variants.append(replace(record, model=name, version=version))
        for app in apps:
            links.setdefault(app, {})[name] = version
    return Linked(tuple(models), tuple(variants), links)


def _part(parts: list[list[frozenset[str]]], apps: frozenset[str]) -> int:
    """The part that has a version for these apps; else the first where they are in no other version, and get one."""
    for i, versions in enumerate(parts):
        if apps in versions:
            return i
    for i, versions in enumerate(parts):
        if not any(apps & other for other in versions):
            versions.append(apps)
            return i
    parts.append([apps])
    return len(parts) - 1


def _free(model: str, part: int, taken: set[str]) -> str:
    if part == 0:
        return model
    number = part + 1
    while f"{model[:56]}-{number}" in taken:
        number += 1
    return f"{model[:56]}-{number}"
