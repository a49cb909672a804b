"""Evaluation of long-context models: perplexity by length and position, needles in a haystack, RULER-like tasks.

The scripts at the top level, `eval_ppl.py`, `eval_needle.py` and `plot.py`, are thin: what they do is here.
"""
