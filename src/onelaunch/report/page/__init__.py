"""The pages of a report: each one HTML file, made from data alone.

comparison.py  of a comparison
plan.py        of an optimisation
diagnosis.py   of a diagnosis
changes.py     of two comparisons side by side
elements.py    text made safe, tables, code, figures
frame.py       the file around them, with page.css and page.js
"""
