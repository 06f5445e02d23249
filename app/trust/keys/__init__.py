"""Keys of a ledger: which the chain admits, which a node signs with, how they are rotated, admitted and revoked."""
