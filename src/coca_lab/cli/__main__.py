"""``python -m coca_lab.cli``."""

from coca_lab.cli import main

raise SystemExit(main())
