"""Creates a certificate authority for one run, and the certificates that it signs.

For private_etcd.py. The authority's key exists in memory only: once it is forgotten, no further
certificate can be signed, even with access to every file of the run. Elliptic keys (P-256), as PEM files.
Certificates of a site's etcd are watched here too, so that a warning precedes their expiry
(job_store.py).
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.expiry import endings, warning_of

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# Clocks of nodes differ; a run is over before the other end.
EARLY = datetime.timedelta(days=1)
LIFE = datetime.timedelta(days=365)
LOOK_EVERY_S = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    cert_pem: str
    key_pem: str = field(repr=False)

    def to_files(self, cert: Path, key: Path) -> None:
        """Writes both files, which must not exist; only the owner can read the key."""
        write_private(cert, self.cert_pem)
        write_private(key, self.key_pem)


class Authority:
    """Signs certificates of one purpose; others verify them with ``ca_pem``.

    Args:
        life: of what it signs, and of itself, from now.
    """

    def __init__(self, name: str, *, life: datetime.timedelta = LIFE) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._life = life
        builder = _builder(name, name, self._key.public_key(), life)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs=True), True).add_extension(key_id, False)
        self._cert = _signed(builder, self._key)
        self._name = name

    @property
    def ca_pem(self) -> str:
        return _pem(self._cert)

    def server(self, name: str, hosts: tuple[str, ...]) -> KeyPair:
        """Issues a certificate for a server on ``hosts`` (names or addresses), also for servers that call
        each other."""
        return self._issue(name, hosts)

    def client(self, name: str) -> KeyPair:
        """Issues a certificate for a client; it can't be used to listen."""
        return self._issue(name, ())

    def _issue(self, name: str, hosts: tuple[str, ...]) -> KeyPair:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose

        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [Purpose.CLIENT_AUTH, *([Purpose.SERVER_AUTH] if hosts else [])]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(name, self._name, key.public_key(), self._life)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs=False), True).add_extension(signer, False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, False)
        key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return KeyPair(_pem(_signed(builder, self._key)), key_pem.decode())


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only its owner can read, whatever the umask. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + life)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _pem(cert: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import serialization

    return cert.public_bytes(serialization.Encoding.PEM).decode()


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


class CertificateWatch:
    """Logs warnings before a certificate of the run's etcd expires: a week before, a day before, and at
    expiry. Runs in a thread of its own, and reads the servers' certificates too.

    Args:
        access: reread from its files for each check: a certificate may be renewed in the meantime.
    """

    def __init__(self, access: EtcdAccess, *, every_s: float = LOOK_EVERY_S) -> None:
        self._access, self._every_s = access, every_s
        self._warned: dict[str, int] = {}  # certificate → how urgent it was when it was told last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its current check, without waiting for it."""
        self._ended.set()

    def check(self, now: datetime.datetime) -> None:
        """Checks once. A renewed certificate is warned of again before its own expiry."""
        for ending in endings(self._access.reread()):
            urgency, text = warning_of(ending, now)
            if urgency > self._warned.get(ending.what, 0):
                logger.log(logging.WARNING if urgency == 1 else logging.ERROR, "%s", text)
            self._warned[ending.what] = urgency

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.check(datetime.datetime.now(datetime.UTC))
            except Exception:  # outermost frame: what only warns must not end anything
                logger.exception("certificate check failed")
            self._ended.wait(self._every_s)
