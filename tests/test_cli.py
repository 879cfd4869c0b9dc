"""The command line as its users meet it: what it says, where it says it, and the exit code."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from mptune import __version__
from mptune.cli import explain, main
from mptune.commands.common import open_page
from mptune.commands.options import parse_duration, parse_size
from mptune.data.metrics.table import METRICS
from mptune.errors import MptuneError
from mptune.resources import small_model
from mptune.settings import SearchSettings, declarations, option_name
from mptune.targets.detect import detect_gpus
from mptune.tuning.sampler.precision import SAMPLERS
from tests.conftest import run_mptune
from tests.graph import models
from tests.reporting.page.reading import data_of

DECLARED = declarations(SearchSettings)
MPTUNE = [sys.executable, "-m", "mptune"]
COMMANDS = ("search", "report", "pick", "inspect", "apply", "targets", "spaces", "doctor")


def test_a_models_names_cannot_break_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = models.product([[1e6] * 8] * 8)
    proto.graph.node[0].name = "a\nb\u2028\x1b[31m"
    path = models.save(proto, tmp_path)
    assert main(["apply", str(path), "--fp16-all", "-o", str(tmp_path / "out.onnx")]) == 0
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith(r"warning: a\nb\u2028\x1b[31m")


@pytest.mark.smoke
def test_version_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mptune {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert all(f"\n  {command} " in captured.out for command in COMMANDS)
    assert captured.err == ""


def test_search_help_has_panels_that_name_metrics_and_samplers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--help-all"]) == 0
    shown = capsys.readouterr().out
    panels = dict.fromkeys(each.panel for each in DECLARED.values() if each.panel)
    places = [shown.index(f"\n{panel}:\n") for panel in panels]
    assert places == sorted(places)
    assert all(re.search(rf"\n  (-o, )?{option_name(name)}", shown) for name, each in DECLARED.items() if each.panel)
    words = " ".join(shown.split())
    assert all(f"{name}," in words for name in METRICS)
    assert f"Default: {SearchSettings().metric}." in words
    assert all(f" {name} " in words for name in SAMPLERS)


def test_help_fits_one_screen_and_names_where_the_rest_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["search", "--help"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 24
    assert max(map(len, short)) <= 80
    for words in ("`mptune search --help-all` shows every option.", "--max-error", "--budget", "--explain", "--quiet"):
        assert any(words in line for line in short)


@pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU")
def test_gpus_that_are_not_here_are_an_error(
    mlp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for target in ("auto", "cpu", "h200"):
        assert main(["search", str(mlp_path), "--gpus", "0,1", "--target", target]) == 1
        assert capsys.readouterr().err.splitlines()[0] == "error: --gpus names GPU 1: no GPUs found here"
    assert list(tmp_path.iterdir()) == []


def search_command(model: Path, data: Path, run: Path, budget: int = 6) -> list[str]:
    """A search whose latencies are predicted, wherever the tests run."""
    target = ["--target", "jetson-orin-nano-8gb", "--budget", str(budget)]
    return ["search", str(model), "--data", str(data), "-o", str(run), *target]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_interrupted_says_how_to_go_on(mlp_path: Path, mlp_data: Path, tmp_path: Path, number: signal.Signals) -> None:
    # The default sampler knows this little model after a dozen plans, and would be done before the interruption.
    command = [*search_command(mlp_path, mlp_data, tmp_path / "my run.mptune", budget=64), "--sampler", "tpe"]
    process = subprocess.Popen(
        [*MPTUNE, *command, "--fresh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background ignores Ctrl-C, and what it starts would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stderr.readline().startswith("[ 3/64]"):
            assert process.poll() is None
        os.killpg(process.pid, number)  # as a terminal does: the worker is hit too
        lines = process.stderr.read().splitlines()
        assert process.stdout.read() == ""
        assert process.wait(timeout=60) == 130
    assert lines[-2:] == ["interrupted", f"hint: to continue, run: {shlex.join(['mptune', *command])}"]
    assert not any("Traceback" in line for line in lines)
    again = search_command(mlp_path, mlp_data, tmp_path / "my run.mptune", budget=5)
    resumed = run_mptune(*again, "--explain", where=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    time_line = resumed.stdout.splitlines()[-1]
    assert all(re.search(rf"^time +\d+ s: .*\b\d+ to {part}", time_line) for part in ("emulate", "build", "think"))
    assert "all-fp32" not in resumed.stderr, "what was evaluated is not evaluated again"


class TestPipesThatEnd:
    def start(self, *arguments: str, **streams: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*MPTUNE, *arguments], **streams)  # type: ignore[call-overload,no-any-return]

    @pytest.mark.parametrize("options", [[], ["--explain"], ["--json"]])
    def test_a_reader_that_leaves_is_no_error(self, finished: Path, options: list[str]) -> None:
        read, write = os.pipe()
        os.close(read)
        process = self.start("report", str(finished), *options, stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        told = process.communicate()[1]
        assert (process.returncode, told) == (0, b"")

    @pytest.mark.parametrize("options", [["--no-such-option"], []])
    def test_an_error_that_nobody_reads(self, tmp_path: Path, options: list[str]) -> None:
        read, write = os.pipe()
        os.close(read)
        process = self.start("report", str(tmp_path / "none"), *options, stdout=subprocess.PIPE, stderr=write)
        os.close(write)
        out = process.communicate()[0]
        assert (process.returncode, out) == (2 if options else 1, b"")

    @pytest.mark.slow
    def test_progress_that_nobody_reads_does_not_end_a_search(
        self, mlp_path: Path, mlp_data: Path, tmp_path: Path
    ) -> None:
        read, write = os.pipe()
        command = search_command(mlp_path, mlp_data, tmp_path / "run.mptune", budget=4)
        process = self.start(*command, "--json", stdout=subprocess.PIPE, stderr=write)
        os.close(write)
        os.read(read, 1)
        os.close(read)
        out = process.communicate()[0]
        assert process.returncode == 0
        assert json.loads(out)["evaluations"] == 4


@pytest.mark.parametrize("command", ["targets", "spaces", "doctor"])
def test_lists_are_tables_or_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    table = capsys.readouterr().out
    assert main([command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    items = document["toolchains"] if command == "doctor" else document
    assert items
    for item in items:
        assert item["name"] in table


def test_a_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = ["report", "nowhere.mptune"]
    assert main(report) == 1
    plain = capsys.readouterr().err
    assert "Traceback" not in plain
    for arguments, debug in ((["--debug", *report], "0"), ([*report, "--debug"], "0"), (report, "1")):
        monkeypatch.setenv("MPTUNE_DEBUG", debug)
        assert main(arguments) == 1
        asked = capsys.readouterr().err
        assert "Traceback" in asked
        assert asked.endswith(plain)
        assert [asked.count(line) for line in plain.splitlines()] == [1, 1], "the hint is printed once"


@pytest.mark.parametrize(
    ("parse", "readable", "unreadable"),
    [
        (
            parse_duration,
            {"30s": 30, "90m": 5400, "8h": 28800, "1h30m": 5400, "1.5h": 5400, "45": 45, " 2m5s ": 125},
            ["", "h", "8 hours", "-5s", "5d", "30s2h", "nan"],
        ),
        (
            parse_size,
            {"20GiB": 20 << 30, "1.5 kB": 1500, "500m": 500_000_000, "12": 12, "12B": 12},
            ["", "GiB", "-5GB", "5PB", "5 GiB or so"],
        ),
    ],
)
def test_durations_and_sizes(parse: Callable[[str], float], readable: dict[str, float], unreadable: list[str]) -> None:
    assert {text: parse(text) for text in readable} == readable
    for text in unreadable:
        with pytest.raises(typer.BadParameter, match="is not a"):
            parse(text)


def test_every_exception_has_words() -> None:
    message, hint, code = explain(OSError(errno.ENOSPC, "No space left on device", "weights.bin"))
    assert (message, code) == ("disk full: cannot write weights.bin", 1)
    assert "free some space" in hint
    assert explain(OSError(errno.EDQUOT, "Disk quota exceeded"))[0].startswith("disk full: cannot write the output")
    assert explain(PermissionError(errno.EACCES, "denied", "run.json"))[0] == "run.json: denied"
    assert explain(MptuneError("m", "h")) == ("m", "h", 1)
    message, hint, code = explain(ValueError("two\nlines"))
    assert (message, code) == ("unexpected ValueError: two lines", 1)
    assert "--debug" in hint
    assert explain(ValueError())[0] == "unexpected ValueError"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_output_that_cannot_be_written_is_no_full_run_directory() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MPTUNE, "spaces"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "error: disk full: cannot write the output, or a temporary file"
    assert hint == "hint: free some space, then run it again"


def test_open_starts_the_browser_with_the_page_where_there_is_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, run = tmp_path / "opened", tmp_path / "a run.mptune"
    code = f"import sys; open({str(opened)!r}, 'w').write(sys.argv[1])"
    monkeypatch.setenv("BROWSER", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} %s")
    monkeypatch.setenv("DISPLAY", ":1")
    open_page(run)
    assert opened.read_text() == (run / "report.html").as_uri()
    assert capsys.readouterr().err == ""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    open_page(run)
    assert capsys.readouterr().err == f"no browser can be opened here: the page is {run / 'report.html'}\n"


def test_the_demo_shows_what_fp16_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--no-open", "-o", str(tmp_path / "run")]) == 0
    answer = capsys.readouterr().out
    assert "overflow (g000); error with all groups in FP16: not finite, emulated\n" in answer
    assert "the fastest with error <= 1e-05\n" in answer
    page = (tmp_path / "run/report.html").read_text()
    assert "was run; error with all groups in FP16: not finite, emulated." in page
    data = data_of(page)
    files = [data["outputs"]["plans"][plan]["outputs"]["clean"]["picture"]["plan"] for plan in (
        data["unpinned"], data["plans"][data["chosen"]][0], data["plans"][data["fp32"]][0])]  # fmt: skip
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(file)))) for file in files]
    assert (pictures[0] == (214, 40, 30)).all(), "nothing is finite"
    assert (pictures[1] == pictures[2]).mean() > 0.99, "as in FP32"
    assert sum(path.stat().st_size for path in small_model("denoiser")) < 1e6
