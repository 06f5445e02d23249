"""``tally`` that may have only so much of something.

    python limited.py NOFILE 160 serve

The first is a limit of setrlimit(2), without RLIMIT_ before it; the second what it is set to.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

PROGRAM = Path(__file__)

if __name__ == "__main__":
    name, most = sys.argv.pop(1), int(sys.argv.pop(1))
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    from cli import main

    main()
