"""A comparison for people.

table.py  in the terminal
html.py   as one HTML file
cells.py  what both say of a row
"""

from onelaunch.report.html import to_html
from onelaunch.report.table import show

__all__ = ["show", "to_html"]
