"""Datasets: which columns mean what, and the preparation of rows from text."""
