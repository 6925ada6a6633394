"""Runs `python -m spark` from a file, because spark-submit takes no module."""

import sys

from spark.__main__ import main

sys.exit(main())
