"""From groups to launches: which function emits a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...kernels.launches import Launch
from .. import groups
from ..groups import Group
from . import (
    finish,
    fused,
    gemm,
    input_layer,
    local,
    parts,
    row_step,
    rows,
    simt,
    tensor_row_step,
    update_layers,
    whole_batch,
)
from .shard import Shard

_EMIT: dict[type[Group], Callable[[Shard, Any], None]] = {
    groups.GatherRows: rows.gather,
    groups.StandardizeRows: rows.standardize,
    groups.DrawDropouts: rows.draw_dropouts,
    groups.DropOut: rows.dropout,
    groups.Differentiate: rows.differentiate,
    groups.LossRows: rows.loss,
    groups.OutputRows: rows.output,
    groups.DenseForward: simt.forward,
    groups.DensePartials: simt.partials,
    groups.AddPartials: simt.add_partials,
    groups.DenseAtomic: simt.atomic,
    groups.DenseInput: simt.backward_input,
    groups.DenseInputUpdate: simt.backward_input_update,
    groups.DenseGradient: simt.gradient,
    groups.DenseUpdate: simt.update,
    groups.SplitRows: gemm.split_rows,
    groups.SplitColumns: gemm.split_columns,
    groups.SumDelta: finish.sum_delta,
    groups.GemmForward: gemm.forward,
    groups.GemmForwardLoss: gemm.forward_loss,
    groups.GemmInput: gemm.backward_input,
    groups.GemmGradient: gemm.gradient,
    groups.GemmUpdates: gemm.updates,
    groups.SumBiases: finish.sum_biases,
    groups.SumOfParts: parts.add,
    groups.JoinedParts: parts.join,
    groups.TakenColumns: parts.take,
    groups.BiasGradient: parts.bias_gradient,
    groups.Head: fused.head,
    groups.Tail: fused.tail,
    groups.RowStep: row_step.forward_and_back,
    groups.InputLayerForward: input_layer.forward,
    groups.TensorRowStep: tensor_row_step.forward_and_back,
    groups.InputLayerGradient: input_layer.gradient,
    groups.UpdateFromBlocks: tensor_row_step.update,
    groups.UpdateLayers: update_layers.update,
    groups.LocalForward: local.forward,
    groups.LocalBackward: local.backward,
    groups.StackForward: local.stack_forward,
    groups.StackBackward: local.stack_backward,
    groups.TotalError: finish.total_error,
    groups.ReducePartials: finish.reduce,
    groups.ClipNorm: finish.clip,
    groups.UpdateAll: finish.update,
    groups.UpdateBiases: finish.update_biases,
}


def emit(shard: Shard, made: Sequence[Group]) -> list[Launch]:
    """The launches of groups on a shard, of which there may have been others before."""
    shard.launches = []
    shard.read_as_fragments = whole_batch.read_as_fragments(shard.selection, made)
    update_layers.lay_side_by_side(shard, made)
    for group in made:
        _EMIT[type(group)](shard, group)
    return finish.sums_together(shard, shard.launches)
