"""Keys and a snapshot claim that the signing tests share; the keys are fixed so that failures repeat."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, mldsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from ledger.verification.snapshot_check import SnapshotClaim
from signing.private_keys import FileSigner

RFC_8032_TEST_1 = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
RFC_8032_TEST_2 = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"


def ed25519(seed: str) -> FileSigner:
    return FileSigner(Path("no-file"), Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)))


@pytest.fixture(scope="session")
def ed25519_signer() -> FileSigner:
    return ed25519(RFC_8032_TEST_1)


@pytest.fixture(scope="session")
def other_signer() -> FileSigner:
    return ed25519(RFC_8032_TEST_2)


@pytest.fixture(scope="session")
def p256_signer() -> FileSigner:
    return FileSigner(Path("no-file"), ec.derive_private_key(0x5EED, ec.SECP256R1()))


@pytest.fixture(scope="session")
def second_signer() -> FileSigner:
    return FileSigner(Path("no-file"), mldsa.MLDSA44PrivateKey.from_seed_bytes(bytes(range(32))))


@pytest.fixture(scope="session", params=["ed25519", "ecdsa-p256"])
def signer(request: pytest.FixtureRequest, ed25519_signer: FileSigner, p256_signer: FileSigner) -> FileSigner:
    return ed25519_signer if request.param == "ed25519" else p256_signer


@pytest.fixture(scope="session")
def claim_of() -> Callable[..., SnapshotClaim]:
    def claim_of(signer: FileSigner, **changes: object) -> SnapshotClaim:
        claim = SnapshotClaim(
            tenant_id="acme",
            from_seq=1001,
            to_seq=1003,
            from_chain_link="0a" * 32,
            to_chain_link="0b" * 32,
            entry_count=3,
            merkle_root="0c" * 32,
            tree_size=1003,
            tree_root="0d" * 32,
            snapshot_hlc="1704931200000:7:node-7f3a",
            previous_snapshot="0e" * 32,
            node_id="node-7f3a",
            key_id=signer.key_id,
        )
        return replace(claim, **changes)

    return claim_of
