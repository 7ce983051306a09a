"""`rayps serve` with a Ray that never comes up: python serve_without_ray.py STATE DESCRIPTORS."""

import resource
import sys
from pathlib import Path

import rayps_api.app
from service_site import NoPlace

from rayps.cli.serve import run
from rayps.service.settings import Settings

if __name__ == "__main__":
    most = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rayps_api.app.choose = lambda settings: NoPlace()
    run(Settings(state_dir=Path(sys.argv[1]), port=0))
