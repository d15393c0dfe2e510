"""Prints what a pyproject.toml needs, with some of its extras: python3 requirements.py pyproject.toml swarm,login."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = project["optional-dependencies"]
    needs = list(project["dependencies"])
    for extra in filter(None, sys.argv[2].split(",")):
        if extra not in extras:
            sys.exit(f"there is no extra {extra!r} in pyproject.toml; there are: {', '.join(extras)}")
        needs += extras[extra]
    print("\n".join(needs))


main()
