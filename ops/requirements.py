"""Prints what a pyproject.toml needs, with some of its extras: python3 requirements.py pyproject.toml swarm,login."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = project["optional-dependencies"]
    needs, wanted = dict.fromkeys(project["dependencies"]), list(filter(None, sys.argv[2].split(",")))
    for extra in wanted:
        if extra not in extras:
            sys.exit(f"there is no extra {extra!r} in pyproject.toml; there are: {', '.join(extras)}")
        for need in extras[extra]:
            if need.startswith("infaas["):
                wanted += need[7:-1].split(",")
            else:
                needs[need] = None
    print("\n".join(needs))


main()
