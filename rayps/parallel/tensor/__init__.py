"""Tensor parallelism: layers that are divided among the workers of a group.

Names say what is split. A linear layer is y = x W^T + b with W [out, in]. In a split by `out`, a worker holds some
rows of W, takes the whole x and computes a slice of y. In a split by `in`, a worker holds some columns of W, takes a
slice of x and computes a partial sum of y. Other names differ: papers on matrices call the split by `out` row-wise and
the split by `in` column-wise, after the rows and columns of W. Megatron-LM and torch name the parts of A in y = x A
with A = W^T: their ColumnParallelLinear and ColwiseParallel are the split by `out`, their RowParallelLinear and
RowwiseParallel the split by `in`. In a plan, `row` means `out` and `column` means `in`, as in papers; `rowwise` and
`colwise` are refused with this explanation.

Between a layer split by `out` and a next layer split by `in`, workers exchange nothing: the pair needs one sum in the
forward pass and one in the backward pass. A layer split by `out` without such a partner gathers its output; a layer
split by `in` without one takes its slice of a whole input. Between the two layers of a pair, the model may only apply
operations to each element (or head) separately, and none with trained parameters; `agree` detects such parameters.
Dropout between them equals the unsplit layer's, bit for bit, in Sequentials, attention and transformer layers. In a
user's own forward(), each worker draws its own dropout there, and all workers continue from the same random state after
the pair. Sequence parallelism (reduce-scatter and all-gather instead of sums) is not implemented.
"""

from rayps.parallel.tensor.apply_plan import pieces, split
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.equal_gradients import agree
from rayps.parallel.tensor.plan import plan
from rayps.parallel.tensor.volume import Volume, volume
from rayps.tensors.layer_split import LayerSplit, Plan

__all__ = ["LayerSplit", "Plan", "TensorCommunicator", "Volume", "agree", "pieces", "plan", "split", "volume"]
