"""The pure domain of Tallystick: clock, canonical bytes, chain, Merkle tree, job fold, verification.

Nothing here does I/O, reads a clock or draws randomness; time, readers and keys are passed in.
"""
