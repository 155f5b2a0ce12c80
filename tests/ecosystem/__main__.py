"""Runs programs: ``python -m tests.ecosystem --device cpu programs_steps``."""

import sys

from .processes import main

sys.exit(main())
