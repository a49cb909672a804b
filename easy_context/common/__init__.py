"""Helpers that every folder uses: files, errors, messages, interrupts."""
