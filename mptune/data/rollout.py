"""Rollouts: outputs that are fed back as inputs over recorded sequences, so that errors add up as they do in use.

A sequence is ``steps`` consecutive samples. Its first step takes the recorded state, later ones what the model itself
gave; all other inputs are the recorded ones. The outputs of a sequence are those of its last step, and those of the
fed-back outputs after a quarter and half of it, as ``NAME after K steps``, so that every error shows how it grew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mptune.errors import SettingsError

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]  # one run of the model: inputs to outputs
# Makes several runs, at once or one after another, and gives their outputs in order.
RunAll = Callable[[Sequence[Callable[[], Mapping[str, np.ndarray]]]], Sequence[Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class Rollout:
    """Which outputs are fed back to which inputs, and over how many steps."""

    pairs: tuple[tuple[str, str], ...]
    steps: int

    @classmethod
    def parse(
        cls, texts: Sequence[str], steps: int | None, inputs: Sequence[str], outputs: Sequence[str], samples: int
    ) -> Rollout | None:
        """Read ``OUTPUT:INPUT`` texts, in which names may hold colons; None where nothing is fed back."""
        if not texts:
            if steps is not None:
                hint = "write --feedback OUTPUT:INPUT, once for each state, and --steps for the length of a sequence"
                raise SettingsError(f"is {steps}, and nothing is fed back", hint, setting="steps")
            return None
        pairs: dict[str, str] = {}
        for text in texts:
            splits = [(text[:k], text[k + 1 :]) for k, letter in enumerate(text) if letter == ":"]
            pair = next(((output, name) for output, name in splits if output in outputs and name in inputs), None)
            if pair is None:
                hint = f"its outputs are {', '.join(map(repr, outputs))}; its inputs {', '.join(map(repr, inputs))}"
                raise SettingsError(f"{text}: the model has no such OUTPUT:INPUT", hint, setting="feedback")
            if pair[1] in pairs:
                raise SettingsError(f"feeds input {pair[1]!r} twice", "give each input once", setting="feedback")
            pairs[pair[1]] = pair[0]
        wanted = samples if steps is None else steps
        if not 2 <= wanted <= samples:
            hint = f"give 2 to {samples}: one step feeds nothing back"
            raise SettingsError(f"{wanted}: the data hold {samples} samples", hint, setting="steps")
        return cls(tuple((output, name) for name, output in pairs.items()), wanted)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The steps before the last after which the fed-back outputs are compared, too."""
        return tuple(sorted({k for k in (self.steps // 4, self.steps // 2) if 0 < k < self.steps}))


def outputs_of(
    run: Run, samples: Sequence[Mapping[str, np.ndarray]], rollout: Rollout | None, run_all: RunAll | None = None
) -> list[dict[str, np.ndarray]]:
    """The outputs of every sample, or of every whole sequence of samples; ``run_all`` makes several single runs."""
    if rollout is None:
        runs = [partial(run, sample) for sample in samples]
        return [dict(outputs) for outputs in (run_all(runs) if run_all else (each() for each in runs))]
    results = []
    for start in range(0, len(samples) - rollout.steps + 1, rollout.steps):
        state: dict[str, np.ndarray] = {}
        earlier: dict[str, np.ndarray] = {}
        for step, sample in enumerate(samples[start : start + rollout.steps], start=1):
            outputs = run({**sample, **state})
            for output, name in rollout.pairs:
                # The output as the input takes it: its type, and its shape where only axes of 1 differ.
                shape = sample[name].shape if outputs[output].size == sample[name].size else outputs[output].shape
                state[name] = np.ascontiguousarray(outputs[output].reshape(shape), dtype=sample[name].dtype)
            if step in rollout.checkpoints:
                earlier |= {f"{output} after {step} steps": np.array(outputs[output]) for output, _ in rollout.pairs}
        results.append({name: np.array(array) for name, array in outputs.items()} | earlier)
    return results
