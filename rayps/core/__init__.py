"""The lowest folder: pure values and decisions, which import no other folder of rayps, neither torch nor ray."""
