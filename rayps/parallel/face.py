"""The face of this folder: the functions that others find by `rayps.workload.division_face.find_division`."""

from rayps.parallel.division.divide import divide
from rayps.parallel.division.model_slice import ModelSlice
from rayps.parallel.division.probe import probe, time_chunks
from rayps.workload.division_face import DivisionFace

FACE = DivisionFace(divide, ModelSlice, probe, time_chunks)
