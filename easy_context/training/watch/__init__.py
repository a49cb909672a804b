"""A watch over the processes of a run, beside its collectives: one that fails, freezes or hangs ends them all.

`watch.py` is what train.py uses; `judge.py` decides, on the first process, that the run is at its end.
"""
