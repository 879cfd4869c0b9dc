"""A model written out in the steps after which ONNX Runtime's CUDA provider rounds to FP16, for its emulation.

- A convolution's result is rounded before the bias is added and again after; a mean over the last axes before the
  division and again after. TensorRT adds the bias before it rounds, so its emulation takes the model as it is.
- A matrix product and its scales, in front and behind, are one step (``matmul_scale_fusion.cc``).
- A GELU that is written out multiplies by FP16's root of 0.5 where the model divides by the root of 2
  (``gelu_fusion.cc``): dividing would make what goes into the Erf 2e-4 larger.
- A sigmoid in BF16 is rounded after each step of ``1 / (1 + exp(-x))``, for negative values one minus that of ``-x``
  (``OP_Sigmoid`` in ``cuda/activation``). In FP16 it is rounded once, unless it is multiplied by its own input (SiLU),
  which becomes one kernel with the same steps (``quick_gelu_fusion.cc``).

``benchmarks.roundings`` on an H200 measures all of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mptune.graph.fused import FusedNodes, epsilon_step, steps_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import consumers_of
from mptune.graph.writing.rounding_steps.matches import divisions_of_gelus, merged_with_scales, sigmoids_of_silus
from mptune.graph.writing.rounding_steps.steps import Steps

__all__ = ["merged_with_scales", "with_rounding_steps"]


def with_rounding_steps(grouped: GroupedModel, fused: Sequence[FusedNodes] = ()) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    model = grouped.model
    look = Lookup(model)
    steps = Steps(model, divisions_of_gelus(grouped, look), sigmoids_of_silus(grouped, look))
    merged = merged_with_scales(grouped)
    inside, epsilons = steps_inside(fused), _other_epsilons(look, fused)
    for node in model.nodes:
        if node.name in epsilons:
            steps.add_with_epsilon(node, *epsilons[node.name])
        elif node.name in inside:
            steps.nodes.append(node)
        else:
            steps.add(replace(node, rounds=False) if node.name in merged else node)
    nodes = tuple(replace(node, index=index) for index, node in enumerate(steps.nodes))
    written_out = replace(
        model,
        nodes=nodes,
        tensors={**model.tensors, **steps.tensors},
        initializers={**model.initializers, **steps.constants(nodes)},
        producer={out: node.index for node in nodes for out in node.outputs if out},
        consumers=consumers_of(nodes),
    )
    groups = tuple(
        replace(group, nodes=tuple(n for name in group.nodes for n in steps.parts.get(name, (name,))))
        for group in grouped.groups
    )
    return GroupedModel(written_out, groups)


def _other_epsilons(look: Lookup, fused: Sequence[FusedNodes]) -> Mapping[str, tuple[int, float]]:
    """Node that adds a norm's epsilon -> at which input it stands, and what the provider adds in FP16."""
    named = {node.name: node for node in look.model.nodes}
    epsilons = {}
    for operator in fused:
        step = None if operator.epsilon is None else epsilon_step(look, [named[name] for name in operator.nodes])
        if step is not None and operator.epsilon is not None:
            epsilons[step[0].name] = step[1], operator.epsilon
    return epsilons
