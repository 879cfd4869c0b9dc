"""A model written out in the steps after which ONNX Runtime's CUDA provider rounds to FP16, for its emulation.

Measured on an H200 (ResNet-50, groups alone in FP16): a convolution's result is rounded before the bias is added and
again after, a mean over the last axes before the division and again after. Emulated with one rounding each, the errors
of these groups are 0.88 (median of 53 convolutions) and 0.71 of the measured ones; written out, 1.00 both. TensorRT
adds the bias before it rounds, so its emulation takes the model as it is.

A matrix product and its scales are computed in one step, without a rounding in between: ``MatMul(q, k) * 0.125`` is one
product with a factor, and so are scales in front of it, and several in a row
(``onnxruntime/core/optimizer/matmul_scale_fusion.cc``). Measured on an H200 (a flow network, groups alone in FP16, 256
rows): with roundings in between, the errors of two correlations were emulated 1.21 and 1.17 times too large, without
them at 0.94 and 1.00 of the measured ones; those of four attention cores are within 1.2 %, and were within 2.2 %.

A GELU that is written out with an Erf becomes one kernel, which multiplies by FP16's nearest value to the root of 0.5
where the model divides by the root of 2 (``onnxruntime/core/optimizer/gelu_fusion.cc``; ``benchmarks.roundings`` on an
H200: all values are those of the formula). FP16's 1.4141 is 1e-4 too small, its 0.7071 too, so with a division each
value that goes into the Erf would be 2e-4 larger.

A sigmoid in BF16 is rounded after each of its own steps: ``1 / (1 + exp(-x))``, for negative values one minus that of
``-x`` (``OP_Sigmoid`` in ``onnxruntime/core/providers/cuda/activation``). In FP16 it is rounded once, unless it is
multiplied by its own input (SiLU), which becomes one kernel with the same steps
(``onnxruntime/core/optimizer/quick_gelu_fusion.cc``). ``benchmarks.roundings`` on an H200: 99.7 % of the values of a
sigmoid in FP16 are those of one rounding, all others are those of the steps; with one rounding 40 to 46 %.
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
    found = {}
    for one in fused:
        step = None if one.epsilon is None else epsilon_step(look, [named[name] for name in one.nodes])
        if step is not None and one.epsilon is not None:
            found[step[0].name] = step[1], one.epsilon
    return found
