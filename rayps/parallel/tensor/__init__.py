"""Tensor parallelism: layers of which every worker of a group holds a part.

Names say what is split. A linear layer is y = x W^T + b with W [out, in]. Split by `out`, a worker holds some rows of
W, takes the whole x and makes a slice of y; split by `in`, it holds some columns, takes a slice of x and makes a
partial sum of y. The trap: the literature calls the first one row-wise and the second column-wise, after W's rows and
columns; Megatron's ColumnParallelLinear and torch's ColwiseParallel are the *first* one, their RowParallelLinear and
RowwiseParallel the second, after y = x A with A = W^T. In a plan, `row` and `column` are taken as the literature's
(`out`, `in`); `rowwise` and `colwise` are refused with this explanation.

The two in turn, `out` and then `in`, exchange nothing at the wide layer between them: one sum forwards, one backwards.
A layer split by `out` without such a partner gathers its output, one split by `in` takes its slice of a whole input.
Between the two only what works element by element, or head by head, may stand, and nothing that learns (`agree` finds
it). Dropout there is the unsplit layer's, bit for bit, in Sequentials, attention and transformer layers; in a forward
of the user's own each worker drops out by itself, and all go on from one random state behind it.
The form with slices of the sequence between the blocks (reduce-scatter and all-gather instead of sums) is not here.
"""

from rayps.parallel.tensor.apply_plan import pieces, split
from rayps.parallel.tensor.check_gradients import agree
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.layer_split import LayerSplit, Plan
from rayps.parallel.tensor.plan import plan
from rayps.parallel.tensor.volume import Volume, volume

__all__ = ["LayerSplit", "Plan", "TensorCommunicator", "Volume", "agree", "pieces", "plan", "split", "volume"]
