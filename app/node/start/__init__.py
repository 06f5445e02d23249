"""From a folder and a database to a node that may write: what is checked, refused, recovered and restored."""
