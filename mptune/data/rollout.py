"""Rollouts: outputs that are fed back as inputs over recorded sequences, so that errors add up as they do in use.

A sequence is ``steps`` consecutive samples. Its first step takes the recorded state, later ones what the model itself
gave; all other inputs are the recorded ones. The outputs of a sequence are those of its last step, and those of the
fed-back outputs after a quarter and half of it, as ``NAME after K steps``, so that every error shows how it grew.

A rollout is sequential: one session per plan, and every step one run of it. One-group errors are taken over whole
sequences, too: an error of one step says nothing of a state that stops moving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mptune.errors import SettingsError

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""One run of the model: inputs to outputs."""

RunAll = Callable[[Sequence[Callable[[], Mapping[str, np.ndarray]]]], Sequence[Mapping[str, np.ndarray]]]
"""Makes several runs, at once or one after another, and gives their outputs in order."""

_HINT = "write --feedback OUTPUT:INPUT, once for each state, and --steps for the length of a sequence"


@dataclass(frozen=True)
class Rollout:
    """Which outputs are fed back, and over how many steps."""

    pairs: tuple[tuple[str, str], ...]
    steps: int

    @classmethod
    def parse(
        cls, texts: Sequence[str], steps: int | None, inputs: Sequence[str], outputs: Sequence[str], samples: int
    ) -> Rollout | None:
        """Read ``OUTPUT:INPUT`` texts, in which names may hold colons; None where nothing is fed back."""
        if not texts:
            if steps is not None:
                raise SettingsError(f"is {steps}, and nothing is fed back", _HINT, setting="steps")
            return None
        pairs = tuple(_pair(text, inputs, outputs) for text in texts)
        fed = [name for _, name in pairs]
        twice = next((name for name in fed if fed.count(name) > 1), None)
        if twice is not None:
            raise SettingsError(f"feeds input {twice!r} twice", "give each input once", setting="feedback")
        wanted = samples if steps is None else steps
        if wanted < 2:
            raise SettingsError(f"is {wanted}", "give at least 2: one step feeds nothing back", setting="steps")
        if wanted > samples:
            raise SettingsError(
                f"{wanted}: the data hold {samples} samples", f"give at most {samples}", setting="steps"
            )
        return cls(pairs, wanted)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """After how many steps the fed-back outputs are kept, too, before the end."""
        return tuple(sorted({k for k in (self.steps // 4, self.steps // 2) if 0 < k < self.steps}))


def _pair(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, str]:
    splits = [(text[:k], text[k + 1 :]) for k, letter in enumerate(text) if letter == ":"]
    for output, name in splits:
        if output in outputs and name in inputs:
            return output, name
    if not splits:
        raise SettingsError(f"{text} is not understood", _HINT, setting="feedback")
    output, name = splits[0]
    if output not in outputs:
        raise SettingsError(
            f"{text}: no output {output!r}", f"the model has {', '.join(map(repr, outputs))}", setting="feedback"
        )
    raise SettingsError(
        f"{text}: no input {name!r}", f"the model has {', '.join(map(repr, inputs))}", setting="feedback"
    )


def outputs_of(
    run: Run,
    samples: Sequence[Mapping[str, np.ndarray]],
    rollout: Rollout | None,
    run_all: RunAll | None = None,
) -> list[dict[str, np.ndarray]]:
    """The outputs of every sample, or of every whole sequence of samples; ``run_all`` makes several single runs."""
    if rollout is None and run_all is not None:
        return [dict(outputs) for outputs in run_all([partial(run, sample) for sample in samples])]
    if rollout is None:
        return [dict(run(sample)) for sample in samples]
    steps = rollout.steps
    starts = range(0, len(samples) - steps + 1, steps)
    return [_end_of(run, samples[start : start + steps], rollout) for start in starts]


def _end_of(run: Run, sequence: Sequence[Mapping[str, np.ndarray]], rollout: Rollout) -> dict[str, np.ndarray]:
    state: dict[str, np.ndarray] = {}
    kept: dict[str, np.ndarray] = {}
    outputs: Mapping[str, np.ndarray] = {}
    for step, sample in enumerate(sequence, start=1):
        outputs = run({**sample, **state})
        state = {name: _as_input(outputs[output], sample[name]) for output, name in rollout.pairs}
        if step in rollout.checkpoints:
            kept.update({f"{o} after {step} steps": np.array(outputs[o]) for o, _ in rollout.pairs})
    return {**{name: np.array(array) for name, array in outputs.items()}, **kept}


def _as_input(output: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """The output as the input takes it: its type, and its shape where only axes of 1 differ."""
    same = output.shape == recorded.shape or output.size != recorded.size
    return np.ascontiguousarray(output if same else output.reshape(recorded.shape), dtype=recorded.dtype)
