"""The table of a front on stdout, in a pipe and in narrow terminals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.cells import cell_len

from mptune.choice import Choice
from mptune.finding import CODES, Finding, Where
from mptune.graph.plan import Precision
from mptune.printable import printable
from mptune.reporting.terminal.front import print_explanation, print_front
from mptune.tuning.evaluation import Origin
from mptune.tuning.front import Front
from mptune.tuning.texts import compared
from tests.reporting.conftest import Bench, Terminal, predicted, printed


def table_of(text: str) -> list[str]:
    """The lines of the table, with the header and the notes below."""
    (table,) = [part.splitlines() for part in text.split("\n\n") if "speedup" in part]
    return table


def on_screen(front: Front, lines: int = 24, show: Callable[..., None] = print_front) -> list[str]:
    """The lines as they stand in a terminal of 80 columns, without colours."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("COLUMNS", "80"), ("LINES", str(lines)), ("TERM", "xterm")):
            patch.setenv(name, value)
        show(front, stream := Terminal())
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]


def long_front(front: Front, bench: Bench, count: int) -> Front:
    """A front of ``count`` points, from 0.9 to 2 ms; all-FP16 at the fast end, all-FP32 at the slow one."""
    points = []
    for k in range(count):
        fp16 = [group.id for bit, group in enumerate(bench.groups) if not (k >> bit) & 1]
        plan = bench.plan(0).replace(dict.fromkeys(fp16, Precision.FP16))
        base = bench.evaluation(0, 0.9 + k / count, 1e-2 * 0.8**k, number=k + 20)
        origin = Origin("seed", f"seed {k}") if k in (5, 9, 20) else Origin("sampler")
        points.append(replace(base, plan=plan, origin=front.fp16.origin if k == 0 else origin))
    return replace(front, fp16=points[0], points=(*points, front.fp32), chosen=points[count // 3])


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_table_fits_and_is_complete(front: Front, columns: int) -> None:
    text = printed(front, columns)
    table = table_of(text)
    assert all(len(line) <= columns for line in table)
    assert "\x1b" not in text
    for point in front.points:
        assert point.plan.fingerprint in text
    for needed in ("0.900", "1.67x", "*2.0e-03", "4.0e-04", "2/6", "all-FP32", "all-FP16"):
        assert needed in text
    assert [line[0] for line in table[1:] if front.chosen.plan.fingerprint in line] == [">"]
    assert ("+-0.5%" in text) == (columns >= 100)
    assert "* of the search samples" in table[-1]


def test_header_choice_and_warnings(front: Front) -> None:
    text = printed(front, show=print_explanation) + printed(front)
    for line in (
        f"model      {front.model_path}", "latency    measured on NVIDIA H200", "; on held-out samples",
        "searched   7 plans, 2 of them failed; 4 on the front", f"chosen     {front.chosen.plan.fingerprint}",
        "warning: the calibration data are random", "\n  nothing that breaks was found on the samples\n",
    ):  # fmt: skip
        assert line in text
    assert "limits not met" not in text
    assert "warning: " not in printed(front, warned=front.warnings), "it was read already"
    text = printed(predicted(front), show=print_explanation) + printed(predicted(front))
    assert all(words in text for words in ("PREDICTED for jetson-orin-nano-8gb", "pred. ms", "emulated"))
    nothing = replace(front, chosen=None, points=(), choice=Choice())
    assert "chosen     none: no plan is feasible" in printed(nothing)


def test_the_plans_beside_the_chosen_one_are_named(front: Front) -> None:
    assert {beside.role for beside in front.neighbours} == {"faster", "more exact"}
    for beside in front.neighbours:
        line = f"{beside.role:<11}{beside.evaluation.plan.fingerprint}: {compared(beside.evaluation, front.chosen)}"
        assert f"\n{line}\n" in printed(front, show=print_explanation)


def overflow(group: str, node: str, value: float = 1e6, code: str = "overflow", **changes: object) -> Finding:
    text = f"value 'v' at node {node!r}: reached {value:g}, in sample 3"
    where = Where(nodes=(node,), groups=(group,), tensors=("v",), samples=(3,))
    finding = Finding(code, CODES[code].severity, "search", where, {"absmax": value}, text, "kept")
    return replace(finding, **changes)  # type: ignore[arg-type]


def test_what_breaks_in_fp16_is_what_the_findings_say(front: Front) -> None:
    fp32, fp16 = front.chosen.plan.fp32_groups[0], front.chosen.plan.fp16_groups[0]
    held = overflow(fp32, "mask", code="mask", evidence={"held_as": -65504.0})
    overflows = [overflow(fp32, f"norm/{k}", severity="info") for k in range(5)]
    front = replace(front, findings=(overflow(fp16, "pos/Add", code="stagnation"), *overflows, held))
    tail = "reached 1e+06, in sample 3; kept"
    assert printed(front, show=print_explanation).split("\n\n")[1].strip().splitlines() == [
        "What breaks in FP16, and why",
        f"  warning: stagnation ({fp16}): value 'v' at node 'pos/Add': {tail}",
        *(f"  info: overflow ({fp32}): value 'v' at node 'norm/{k}': {tail}" for k in range(3)),
        "  2 more findings 'overflow' are in front.json",
        "  see docs/reference/findings.md#stagnation, docs/reference/findings.md#overflow",
    ]
    text = printed(front)
    assert f"\nbreaks     in FP16: stagnation ({fp16}), overflow ({fp32})\n" in text
    assert "warning: value" not in text, "it is told once"
    findings = tuple(overflow(group, f"n{k}") for k, group in enumerate(front.fp32.plan.fp32_groups))
    (line,) = re.findall("^breaks .*$", printed(replace(front, findings=findings)), re.MULTILINE)
    assert line.endswith(f" and {len(findings) - 2} more")


def test_a_dozen_rows_unless_all_are_asked_for(front: Front, bench: Bench) -> None:
    front = long_front(front, bench, 40)
    lines = table_of(printed(front))
    assert len(lines) == 1 + 12 + 1
    assert "29 more rows: --all" in lines[-1]
    shown = "\n".join(lines)
    for wanted in (front.chosen, front.fp32, front.fp16, front.points[0], front.points[-1]):
        assert wanted.plan.fingerprint in shown
    places = [k for k, point in enumerate(front.points) if point.plan.fingerprint in shown]
    assert max(b - a for a, b in pairwise(places)) <= 7, "the others lie between"
    every = table_of(printed(front, every=True))
    assert sum(point.plan.fingerprint in line for point in front.points for line in every) == 41


def test_no_word_breaks_at_80_columns(front: Front, bench: Bench) -> None:
    front = long_front(front, bench, 20)
    sentence = " ".join(f"word{k}" for k in range(60))
    named = replace(front.points[6], origin=Origin("seed", "activations over 512 in FP32 and the head"))
    points = (*front.points[:6], named, *front.points[7:])
    front = replace(front, warnings=(sentence,), choice=Choice(tolerance=(sentence,), kind="limits"), points=points)
    lines = on_screen(front)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert words.count("word17") == 2, "in the choice and in the warning, whole"
    assert set(words) & {f"word{k}"[:n] for k in range(60) for n in range(1, 5)} == set()
    assert sum(bool(re.match(r"[> ] {2}[0-9a-f]{12}  ", line)) for line in lines) == 12, "one line a plan"
    (row,) = [line for line in lines if line.startswith(f">  {named.plan.fingerprint}")]
    assert re.search(r"  activations over( 512( in( FP32( and( the)?)?)?)?)?\.\.\.$", row)


def test_one_error_column_with_one_meaning(front: Front) -> None:
    bare = tuple(replace(point, held_out=None) for point in front.points)
    front = replace(front, points=bare, chosen=bare[1])
    assert "; on the search samples" in printed(front, show=print_explanation)
    assert not re.search(r"\*|held-out", "".join(table_of(printed(front))))


@pytest.mark.parametrize(
    "name", ["<b>a'b\"c</b>", "two\nlines", "\x1b]0;title\x1b[31m", "[bold red]x[/]", "naïve 🦜", "n" * 10_000]
)
def test_names_stay_text_on_a_terminal(front: Front, name: str) -> None:
    path = Path(f"{name[:50]}.onnx")
    front = replace(front, findings=(overflow("g001", name),), warnings=(f"about {name}",), model_path=path)
    lines = on_screen(front, 60, print_explanation)
    lines += on_screen(front, 60)
    assert max(map(cell_len, lines)) <= 80
    shown = "".join("".join(lines).split())
    assert not set(shown) & {"\x1b", "\x07"}
    assert "".join(printable(name)[-40:].split()) in shown
    assert len([line for line in lines if "warning: overflow (g001)" in line]) == 1
    assert len(lines) < 75 + len(name) / 70


def test_all_fp32_has_no_ratio_of_errors(front: Front) -> None:
    text = printed(replace(front, chosen=front.fp32), show=print_explanation)
    assert re.search(r"^faster .* ms less \([\d.]+ %\), error from 0 to 3.0e-04$", text, re.MULTILINE)
    text = printed(replace(front, chosen=front.points[-2]), show=print_explanation)
    assert re.search(r"^more exact .* ms more \([\d.]+ %\), error from \S+ to 0$", text, re.MULTILINE)


def test_the_answer_is_short_and_its_commands_can_be_pasted(
    front: Front, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir.parent / "my runs"
    folder.mkdir()
    run_dir = run_dir.rename(folder / "model.mptune")
    front = replace(front, run_dir=run_dir)
    monkeypatch.chdir(folder.parent)
    assert "infer.py" not in printed(front)
    (run_dir / "chosen").mkdir()
    for name in ("chosen/model.onnx", "chosen/infer.py", "report.html"):
        (run_dir / name).touch()
    answer = "\n".join(on_screen(front)).rpartition("\n\n")[2].splitlines()
    assert answer == [
        f"chosen     {front.chosen.plan.fingerprint}: {front.chosen_reason}",
        "faster     1.67x: 1.200 ms, all-FP32 2.000 ms",
        "more exact 12x: error 2.0e-03, all-FP16 2.4e-02",
        "model      my runs/model.mptune/chosen/model.onnx",
        "try it     python 'my runs/model.mptune/chosen/infer.py'",
        "page       my runs/model.mptune/report.html",
        f"another    more exact, {compared(front.neighbours[-1].evaluation, front.chosen)}:",
        f"           mptune pick 'my runs/model.mptune' --plan {front.neighbours[-1].evaluation.plan.fingerprint}",
        "details    mptune report 'my runs/model.mptune' --explain",
    ]
    (run_dir / "chosen" / "model.engine").touch()
    assert "engine     my runs/model.mptune/chosen/model.engine" in printed(front)
