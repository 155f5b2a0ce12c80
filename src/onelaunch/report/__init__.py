"""A comparison for people: a table in the terminal, and one HTML file."""

from onelaunch.report.html import to_html
from onelaunch.report.table import show

__all__ = ["show", "to_html"]
