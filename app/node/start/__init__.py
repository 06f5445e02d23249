"""From a folder and a database to a node that may write: checks, refusals, recovery and restore."""
