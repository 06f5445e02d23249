"""Watching chains: one tail of each watched tenant, shared by all who watch it."""
