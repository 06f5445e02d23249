"""A time-stamping authority of its own: a CA made here, and ``openssl ts`` behind a small HTTP server."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CONFIG = """
[tsa]
default_tsa = one
[one]
serial = {folder}/serial
signer_cert = {folder}/tsa.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
accuracy = secs:1
ess_cert_id_alg = sha256
"""


class Authority:
    """The authority in ``folder``. ``answer`` may be set to what it answers instead of a stamp.

    One ``with_chain`` is certified by an intermediate CA, and sends its chain along as OpenSSL does: as in its file.
    """

    def __init__(self, folder: Path, *, with_chain: bool = False) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca_file = folder / "ca.pem"
        self.url = ""
        self.status = 200
        self.answer: bytes | None = None
        self.asked = 0
        _make_certificates(folder, with_chain=with_chain)
        (folder / "serial").write_text("01\n")
        chain = f"certs = {folder}/chain.pem\n" if with_chain else ""
        (folder / "tsa.cnf").write_text(_CONFIG.format(folder=folder) + chain)

    def stamp(self, query: bytes) -> bytes:
        """The TimeStampResp to a TimeStampReq."""
        file = self._folder / f"query-{self.asked}"
        file.write_bytes(query)
        command = ["openssl", "ts", "-reply", "-config", str(self._folder / "tsa.cnf"), "-queryfile", str(file)]
        subprocess.run([*command, "-out", f"{file}.tsr"], check=True, capture_output=True, timeout=60)
        return Path(f"{file}.tsr").read_bytes()

    def reply(self, query: bytes) -> bytes:
        """What is answered."""
        self.asked += 1
        return self.answer if self.answer is not None else self.stamp(query)

    def vouches_for(self, note: bytes, response: bytes) -> bool:
        """Whether openssl finds the stamp to hold."""
        (self._folder / "note").write_bytes(note)
        (self._folder / "response").write_bytes(response)
        files = ["-data", str(self._folder / "note"), "-in", str(self._folder / "response")]
        command = ["openssl", "ts", "-verify", *files, "-CAfile", str(self.ca_file)]
        return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


@contextmanager
def serving_stamps(folder: Path, port: int = 0, *, with_chain: bool = False) -> Iterator[Authority]:
    """An authority that answers on a port of its own."""
    authority = Authority(folder, with_chain=with_chain)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = authority.reply(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/timestamp-query"
            self.send_response(authority.status)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    authority.url = f"http://127.0.0.1:{server.server_port}/tsa"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield authority
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_certificates(folder: Path, *, with_chain: bool) -> None:
    ca_key, between_key, tsa_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name, between_name = _name(f"CA {folder.name}"), _name(f"CA between {folder.name}")
    # The longest of the three comes last in DER, and first as OpenSSL sends it.
    tsa_name = _name(f"TSA {folder.name} of a name that is longer than the others")
    ca, between = (
        _certificate(name, ca_name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
        for name, key in ((ca_name, ca_key), (between_name, between_key))
    )
    issuer_name, issuer_key = (between_name, between_key) if with_chain else (ca_name, ca_key)
    tsa = (
        _certificate(tsa_name, issuer_name, tsa_key)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    (folder / "chain.pem").write_bytes(between.public_bytes(Encoding.PEM) + ca.public_bytes(Encoding.PEM))
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "tsa.pem").write_bytes(tsa.public_bytes(Encoding.PEM))
    private = tsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "tsa.key").write_bytes(private)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
    )
