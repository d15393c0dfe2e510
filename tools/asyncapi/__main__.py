"""`python -m tools.asyncapi [--check]`: write docs/asyncapi.yaml, or say whether it is current (exit 1 when not)."""

import sys
from pathlib import Path

from tools.asyncapi.document import document
from tools.asyncapi.yaml import dump

PATH = Path(__file__).parents[2] / "docs" / "asyncapi.yaml"


def main() -> None:
    """Write or check the file."""
    text = dump(document())
    if "--check" in sys.argv[1:]:
        if not PATH.exists() or PATH.read_text() != text:
            sys.exit("docs/asyncapi.yaml is not current: run `python -m tools.asyncapi`")
        return
    PATH.write_text(text)


if __name__ == "__main__":
    main()
