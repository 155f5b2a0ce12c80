"""A comparison for people.

table.py  in the terminal
html.py   as one HTML file
cells.py  the texts of both
"""

from onelaunch.report.html import to_html
from onelaunch.report.table import show

__all__ = ["show", "to_html"]
