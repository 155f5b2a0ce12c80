"""``python -m onelaunch``."""

from onelaunch.tools.cli import main

main()
