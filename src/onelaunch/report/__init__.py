"""A comparison or a diagnosis for people.

table.py     a comparison in the terminal
html.py      as one HTML file
cells.py     the texts of both
findings.py  a diagnosis in the terminal
"""
