"""The worker process: ``python -m mptune.engines.worker`` with its pipes' ends and its parent as arguments."""

from __future__ import annotations

from mptune.engines.worker.child import main

if __name__ == "__main__":
    main()
