"""The worker process: ``python -m mptune.processes`` with its pipes' ends and its parent as arguments."""

from __future__ import annotations

from mptune.processes.child import main

if __name__ == "__main__":
    main()
