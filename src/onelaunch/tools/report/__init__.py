"""Results for people, in one shape.

result.py    what all results have: JSON, and a document
document.py  the document: the answer, tables, charts, findings
terminal.py  a document in the terminal
page.py      a document as one HTML file, with page.css and page.js
charts.py    its two charts: bars and timelines
units.py     figures as people read them
"""
