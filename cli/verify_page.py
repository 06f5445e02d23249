"""``tally verify-page``: save the page that verifies files in a browser, to hand it to somebody or to keep it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from app.pages.verify_page import verify_page as page_of_package
from signing.files import whole_file
from terminal.outcome import out


def verify_page(
    output: Annotated[
        Path,
        typer.Option(
            "--out", "--output", "-o", metavar="FILE", help="The file to write; one that is there is replaced."
        ),
    ] = Path("verify.html"),
) -> None:
    """Save the page that verifies bundles and receipts in a browser alone, as one file that opens from disk.

    It is what a service answers at /verify. It needs no network and no
    service: open it, drop a bundle or a receipt, and the keys you trust.

    \b
    Examples:
      tally verify-page -o verify.html
    """
    content = page_of_package().file.content
    with whole_file(output) as file:
        file.write(content)
    out.print(f"{output}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}", markup=False)
