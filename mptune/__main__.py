"""``python -m mptune``: the command line."""

from __future__ import annotations

import sys

from mptune.cli import main

sys.exit(main())
