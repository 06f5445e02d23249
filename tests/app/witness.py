"""A witness of its own making, from the texts of c2sp.org/tlog-cosignature and c2sp.org/tlog-witness."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from ledger.merkle import verify_consistency

if TYPE_CHECKING:
    import httpx


class Witness:
    """Keeps the newest tree head it cosigned of each origin, and cosigns what extends it, with a key of either kind."""

    def __init__(self, name: str = "witness.example/w1", seed: int | bytes = 1, *, is_ml_dsa: bool = False) -> None:
        self.name = name
        self._is_ml_dsa = is_ml_dsa
        secret = seed if isinstance(seed, bytes) else bytes([seed]) * 32
        self._private = (
            MLDSA44PrivateKey.from_seed_bytes(secret) if is_ml_dsa else Ed25519PrivateKey.from_private_bytes(secret)
        )
        typed = (b"\x06" if is_ml_dsa else b"\x04") + self._private.public_key().public_bytes_raw()
        self._key_id = hashlib.sha256(name.encode() + b"\n" + typed).digest()[:4]
        self.verifier_key = f"{name}+{self._key_id.hex()}+{base64.b64encode(typed).decode()}"
        self.seen: dict[str, tuple[int, bytes]] = {}

    def cosign(self, note: str, time_s: int) -> str:
        """``note`` with one more signature line, whatever is in it."""
        text = note.rpartition("\n\n")[0] + "\n"
        return note + self.line(text, time_s)

    def line(self, text: str, time_s: int) -> str:
        """The signature line on ``text``."""
        message = f"cosignature/v1\ntime {time_s}\n{text}".encode()
        if self._is_ml_dsa:
            origin, size, root = text.split("\n")[:3]
            names = [bytes([len(each.encode())]) + each.encode() for each in (self.name, origin)]
            message = b"subtree/v1\n\0" + names[0] + time_s.to_bytes(8, "big") + names[1]
            message += (0).to_bytes(8, "big") + int(size).to_bytes(8, "big") + base64.b64decode(root)
        signature = self._private.sign(message)
        encoded = base64.b64encode(self._key_id + time_s.to_bytes(8, "big") + signature).decode()
        return f"\u2014 {self.name} {encoded}\n"

    def watch(self, client: httpx.Client, tenant_id: str, time_s: int) -> str:
        """Fetch the newest checkpoint, hold it to the one seen before with a consistency proof, and cosign it."""
        note = client.get(f"/v1/log/{tenant_id}/checkpoint").raise_for_status().text
        origin, size_text, root_text = note.split("\n")[:3]
        size, root = int(size_text), base64.b64decode(root_text)
        if origin in self.seen:
            old_size, old_root = self.seen[origin]
            params: dict[str, str | int] = {"tenant_id": tenant_id, "first": old_size, "second": size}
            proof = client.get("/v1/chain/proof/consistency", params=params).raise_for_status().json()
            verify_consistency(old_size, size, old_root, root, [bytes.fromhex(each) for each in proof["hashes"]])
        self.seen[origin] = size, root
        return self.cosign(note, time_s)
