"""`python -m kvasir_operator`, for where the command is not installed."""

import sys

from kvasir_operator.cli import main

sys.exit(main())
