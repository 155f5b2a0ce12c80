"""``python -m onelaunch``."""

from onelaunch.cli import main

main()
