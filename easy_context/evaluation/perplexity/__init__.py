"""Perplexity by context length and by position, over documents of text or tokens."""
