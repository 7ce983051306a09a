"""Run the command line as `python -m rayps.cli`."""

from rayps.cli.main import main

raise SystemExit(main())
