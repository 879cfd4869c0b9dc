"""The worker process: ``python -m mptune.engines.worker`` with its pipes' ends and its parent as arguments."""

from __future__ import annotations

import sys

from mptune.engines.worker.parenthood import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[3]))  # before anything that takes time: a parent that dies meanwhile would not be noticed
    from mptune.engines.worker.child import main

    main()
