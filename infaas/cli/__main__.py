"""`python -m infaas.cli` runs the command line."""

import sys

from infaas.cli import main

sys.exit(main())
