"""Needles in a haystack and RULER-like tasks: prompts of an exact length, scored by one forward pass each."""
