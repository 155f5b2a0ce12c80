"""The inference checklist, applied to a callable: each step tried, checked, measured, and kept only
if it is right and pays.

plan.py   the result as data: what was tried, what is kept
"""
