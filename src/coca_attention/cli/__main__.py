"""``python -m coca_attention.cli``."""

from coca_attention.cli import main

raise SystemExit(main())
