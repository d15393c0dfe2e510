"""`python -m infaas.cli` is `infaas`."""

import sys

from infaas.cli import main

sys.exit(main())
