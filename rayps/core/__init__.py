"""The lowest folder: pure values and decisions. It imports no other folder of rayps, and neither torch nor ray."""
