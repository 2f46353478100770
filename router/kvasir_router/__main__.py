"""`python -m kvasir_router`, for where the command is not installed."""

import sys

from kvasir_router.cli import main

sys.exit(main())
