"""Evaluation of long-context models: perplexity by length and position, needles in a haystack, RULER-like tasks.

`eval_ppl.py`, `eval_needle.py` and `plot.py` at the top level parse flags and call what is here.
"""
