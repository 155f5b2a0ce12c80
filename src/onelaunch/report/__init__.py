"""Comparisons, plans, diagnoses and profiles for people.

table.py     a comparison in the terminal
changed.py   two comparisons in the terminal
findings.py  a diagnosis in the terminal
profile.py   a profile in the terminal
cells.py     the texts of a comparison
page/        a result as one HTML file
charts/      the charts of the pages
"""
