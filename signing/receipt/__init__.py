"""Receipts: one file that proves one job, or one entry, alone and offline.

Making, reading and judging them knows neither the service nor a database nor an event loop.
"""
