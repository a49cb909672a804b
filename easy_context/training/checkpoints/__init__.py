"""Folders `checkpoint-<step>/` from which a run that was cut off goes on.

`writing.py` saves them, `resuming.py` chooses one and loads it; `files.py` is about what is on the disk, `state.py` and
`pieces.py` about what is saved. The rows of a step are a function of the step alone, so nothing of the data is saved.
"""
