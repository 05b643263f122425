"""Self-signed certificate of a generation server, made at its start and pinned by its SHA-256.

It is not signed by an authority: clients compare the SHA-256 with the registered one. Neither
certificate nor key is ever in a file system: ssl reads them from anonymous memory.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import ssl
from dataclasses import dataclass, field

from realsys.runtime.linux import memfd_create

# Clocks of nodes differ; a run is over before the other end.
_EARLY = datetime.timedelta(days=1)
_LIFE = datetime.timedelta(days=365)


@dataclass(frozen=True)
class ServerCertificate:
    """In PEM; ``sha256`` is of the DER form, in hex, as clients pin it."""

    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    sha256: str


def self_signed(host: str) -> ServerCertificate:
    """Makes a new elliptic key (P-256) and its certificate for a server that listens as ``host``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "realsys generation server")])
    try:
        who: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        who = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectAlternativeName([who]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    return ServerCertificate(
        cert_pem=cert.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        sha256=hashlib.sha256(cert.public_bytes(serialization.Encoding.DER)).hexdigest(),
    )


def server_context(certificate: ServerCertificate) -> ssl.SSLContext:
    """Makes a TLS 1.3 context with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module takes paths only: an anonymous file has one while it is open, for us alone.
    with os.fdopen(memfd_create("certificate"), "wb") as file:
        file.write(certificate.key_pem + certificate.cert_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
