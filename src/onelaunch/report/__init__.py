"""A comparison, a diagnosis or a profile for people.

table.py     a comparison in the terminal
html.py      as one HTML file
cells.py     the texts of both
findings.py  a diagnosis in the terminal
profile.py   a profile in the terminal
"""
