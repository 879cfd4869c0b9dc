"""The worker process: ``python -m mptune.processes`` with its pipes' ends and its parent as arguments."""

from mptune.processes.child import main

main()
