"""The plan: what one training step computes, as a flat list of typed operations over named buffers.

This is the narrow waist between describing a network and running it.  :func:`lower` turns layers, a
loss and an optimizer into a :class:`Plan`; a backend reads nothing else.  A plan fixes operations,
widths and shards; the number of rows is chosen at run time, up to a capacity.

A step runs gather → forward … → loss → backward … once for each shard of the batch's rows, then
``Reduce`` → (``Norm``) → ``Update`` once.  Backward operations overwrite *partials*, one per shard and
use of a parameter; ``Reduce`` alone adds them up, in fixed order, and divides by the batch's summed
sample weight.  Where several processes, *ranks*, train the network together, each computes some of
the shards and moves a slice of the parameters; ``ExchangePartials`` and ``GatherParameters`` stand
around that.  Of a small network each moves all parameters, after one exchange, ``GatherPartials``.
Or they have *parts* of the network each, columns or rows of the weights, and ``SumParts`` and
``JoinParts`` stand between the layers.

A plan holds two such lists: ``training``, and ``evaluation`` without dropout or backward.  Buffers
name what is computed; what is stored, and where, is the backend's business.
"""

from __future__ import annotations

from .construction import Builder as Builder
from .construction import Lowerable as Lowerable
from .construction import lower as lower
from .construction import on_ranks as on_ranks
from .links import Link as Link
from .links import Traffic as Traffic
from .operations import ActivationBackward as ActivationBackward
from .operations import BetweenParts as BetweenParts
from .operations import BiasBackward as BiasBackward
from .operations import Dense as Dense
from .operations import DenseBackward as DenseBackward
from .operations import Dropout as Dropout
from .operations import DropoutBackward as DropoutBackward
from .operations import ExchangePartials as ExchangePartials
from .operations import Gather as Gather
from .operations import GatherParameters as GatherParameters
from .operations import GatherPartials as GatherPartials
from .operations import JoinParts as JoinParts
from .operations import LocallyConnected as LocallyConnected
from .operations import LocallyConnectedBackward as LocallyConnectedBackward
from .operations import Loss as Loss
from .operations import Norm as Norm
from .operations import Operation as Operation
from .operations import Output as Output
from .operations import Reduce as Reduce
from .operations import Standardize as Standardize
from .operations import SumParts as SumParts
from .operations import TakeColumns as TakeColumns
from .operations import Update as Update
from .operations import Weighted as Weighted
from .operations import WeightedBackward as WeightedBackward
from .plan import CARD_PRECISIONS as CARD_PRECISIONS
from .plan import PRECISIONS as PRECISIONS
from .plan import REDUCTIONS as REDUCTIONS
from .plan import WAYS as WAYS
from .plan import Buffer as Buffer
from .plan import Choice as Choice
from .plan import Parameter as Parameter
from .plan import Partial as Partial
from .plan import PartOf as PartOf
from .plan import Plan as Plan
from .plan import Precision as Precision
from .plan import Reduction as Reduction
from .plan import Segment as Segment
from .plan import Slice as Slice
from .plan import Tensor as Tensor
from .plan import TrainedRange as TrainedRange
from .plan import Way as Way
from .plan import inputs_of as inputs_of
from .plan import slices_of as slices_of
from .plan import split_axis as split_axis
from .sharding import additions as additions
from .sharding import block_size as block_size
from .sharding import nodes_of as nodes_of
from .sharding import parts_of as parts_of
from .sharding import shards_of as shards_of
from .tensor import part_name as part_name
from .tensor import split_plan as split_plan
from .tensor_split import MOST_PARTS as MOST_PARTS
from .tensor_split import Parts as Parts
from .tensor_split import bounds as bounds
