"""Folders `checkpoint-<step>/` from which an interrupted run continues.

`writing.py` saves checkpoints, `resuming.py` chooses and loads one, `files.py` handles the files on disk, and
`state.py` and `pieces.py` collect the saved state. A step's rows depend only on its number, so no data state is saved.
"""
