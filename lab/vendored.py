"""Write ``app/pages/verify/ml_dsa.js``, ML-DSA-44 of noble-post-quantum as one module: ``python -m lab.vendored``.

Run it in the root of the repository. npm brings the packages, each of which must have the digest that is given here.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Final

MODULE: Final = Path("app/pages/verify/ml_dsa.js")
MODULE_SHA256: Final = "518dd22161388a9f0e6e2a78144674743919b52c80f386a732ba96da4a760645"
LIBRARIES: Final = {
    "@noble/post-quantum@0.7.1": (
        "sha512-+P9981IiAnVh+rmcubozzVwrEy3XsN/tMhTnvsjV9VDaYpOnNCqWqKo2FLWxbu92YHfjGIlE5XnW175UK+ln+Q=="
    ),
    "@noble/curves@2.4.0": (
        "sha512-P4/62zrgfH33CneE3Dn4WhJVA22YUU0eR51wKIan4NVRvwsA0YnPTwWGpNbpuacSujmSFLvyzpyuR30+fbq2Ew=="
    ),
    "@noble/hashes@2.4.0": (
        "sha512-X5XaVWZIBCT7HHZGm5I7ZQXDwLG+bGXuSrMQAW+7Zvl87h1kmc1ZB1VSRJcpUfoUrGQp4Fkoxm5kZ+Ms+aW+eA=="
    ),
}
"""Digests of the published packages that the module is made of."""
BUNDLER: Final = {
    "esbuild@0.28.2": (
        "sha512-HKVLS8dvII+xoKW9kmqxbRKrnWEXfJJr/FZhhJmiqIB0e053QNYFqOBouTMO/k5sID4MvCiUCvv8b9M4h32wIA=="
    )
}

_ENTRY: Final = 'export { ml_dsa44 } from "@noble/post-quantum/ml-dsa.js";\n'
_OPTIONS: Final = (
    *("--bundle", "--minify", "--legal-comments=none", "--target=es2022", "--format=iife", "--global-name=noble"),
    "--footer:js=export const ml_dsa44 = noble.ml_dsa44;",
)


def module() -> str:
    """The text of the module, made of the published packages.

    Raises:
        ValueError: npm has something else under a name and version.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = LIBRARIES | BUNDLER
        npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder)
        subprocess.run([*npm, *wanted], check=True)
        packages = folder / "node_modules"
        locked = json.loads((packages / ".package-lock.json").read_text())["packages"]
        for package, digest in wanted.items():
            found = locked[f"node_modules/{package.rpartition('@')[0]}"]["integrity"]
            if found != digest:
                raise ValueError(f"{package} is {found}, not {digest}")
        (folder / "entry.js").write_text(_ENTRY)
        esbuild = (packages / ".bin/esbuild", "entry.js", *_OPTIONS)
        bundled: str = subprocess.run(esbuild, cwd=folder, check=True, capture_output=True, text=True).stdout
        return _header(packages) + bundled


def _header(packages: Path) -> str:
    """What the module is made of, and the licences."""
    texts = {(packages / each.rpartition("@")[0] / "LICENSE").read_text().strip() for each in LIBRARIES}
    lines = [f"ML-DSA-44 (FIPS 204) of {', '.join(LIBRARIES)}, under the licences below."]
    lines += ["Made by `python -m lab.vendored`; not to be edited."]
    for text in sorted(texts):
        lines += ["", *text.splitlines()]
    return "".join(f"// {line}".rstrip() + "\n" for line in lines)


if __name__ == "__main__":
    MODULE.write_text(module())
