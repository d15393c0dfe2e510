"""`python -m tools.openapi [--check]`: write the document that the gateway serves, or say whether it is current (exit 1 when not)."""

import sys
from pathlib import Path

from tools.openapi.document import text

PATH = Path(__file__).parents[2] / "services" / "gateway" / "openapi.json"  # docs/openapi.json links to it


def main() -> None:
    """Write or check the file."""
    found = text()
    if "--check" in sys.argv[1:]:
        if not PATH.exists() or PATH.read_text() != found:
            sys.exit("services/gateway/openapi.json is not current: run `python -m tools.openapi`")
        return
    PATH.write_text(found)


if __name__ == "__main__":
    main()
