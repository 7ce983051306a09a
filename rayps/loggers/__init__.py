"""Callbacks that log a run elsewhere: TensorBoard, MLflow, Weights & Biases. Each needs an extra of the same name.

Example:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rayps.train(work, workers=2, callbacks=[rayps.loggers.TensorBoard(folder, name="first")])
"""

from rayps.loggers.ml_flow import MLflow
from rayps.loggers.tensor_board import TensorBoard
from rayps.loggers.weights_and_biases import WandB

__all__ = ["MLflow", "TensorBoard", "WandB"]
