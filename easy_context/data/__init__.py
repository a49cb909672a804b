"""Datasets: opening them, the meaning of their columns, and the preparation of rows from text."""
