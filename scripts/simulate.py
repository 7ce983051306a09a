"""Simulate rayps on a virtual clock, with faults, from many seeds: see CONTRIBUTING.md.

python scripts/simulate.py                     # 5,000 seeds on all cores; other ones each day
python scripts/simulate.py --seeds 100000      # more
python scripts/simulate.py --seed 17 --trace   # one seed, with all its events
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])

from simulation.seeds import main

if __name__ == "__main__":
    sys.exit(main())
