"""Sharing one event loop: long work in turns, at a share of the time, a few pieces at once; what stops it."""
