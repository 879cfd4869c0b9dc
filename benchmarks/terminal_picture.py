"""Draw the README's picture of a search: ``python -m benchmarks.terminal_picture``.

Runs the README's command in a terminal of 100 columns and converts its standard output to an SVG.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS = "search benchmarks/models/digits_vit.onnx --data benchmarks/models/digits_calib.npz --budget 50"
COLUMNS = 100


def printed(arguments: list[str]) -> str:
    """Standard output of mptune on a terminal, with its colours."""
    main_end, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command, quiet = [sys.executable, "-m", "mptune", *arguments], subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=terminal, stderr=quiet, env=environment, cwd=ROOT)
    os.close(terminal)
    parts = []
    while True:
        try:
            part = os.read(main_end, 1 << 16)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        parts.append(part)
    if process.wait() != 0:
        raise SystemExit(f"mptune ended with {process.returncode}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "digits_vit.mptune"
        text = printed([*ARGUMENTS.split(), "--out", str(run)]).replace(f"{run.parent}/", "")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115, PTH123
    command = f"mptune {ARGUMENTS}".replace(" --data", " \\\n    --data")
    console.print(Text.assemble(("$ ", "bold green"), command), soft_wrap=True)
    console.print(Text.from_ansi(text.rstrip().replace(f"{ROOT}/", "")), soft_wrap=True)
    svg = console.export_svg(title="mptune")
    # No fonts from elsewhere: the page must not call another host.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (ROOT / "benchmarks" / "terminal.svg").write_text(svg)


if __name__ == "__main__":
    main()
