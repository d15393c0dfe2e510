"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document and nothing else.")]
DataDir = Annotated[
    Path | None, Parameter(name="--data-dir", help="Directory of the `infaas up` system to use; else INFAAS_DATA_DIR.")
]
