"""Creates certificates at run time, in memory: for a run's own etcd, and for a generation server.

The key of an ``Authority`` exists in memory only: once it is forgotten, no further certificate can be
signed, even with access to every file of the run. A ``self_signed`` certificate has no authority: clients
compare its SHA-256 with the one that the server registered. Elliptic keys (P-256), as PEM.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.trial.folders import write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# Clocks of nodes differ; a run is over before the other end.
EARLY = datetime.timedelta(days=1)
LIFE = datetime.timedelta(days=365)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    cert_pem: str
    key_pem: str = field(repr=False)

    def to_files(self, cert: Path, key: Path) -> None:
        """Writes both files, which must not exist; only the owner can read the key."""
        write_private(cert, self.cert_pem.encode())
        write_private(key, self.key_pem.encode())

    @property
    def sha256(self) -> str:
        """SHA-256 of the certificate's DER form in hex, as clients pin it."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.cert_pem)).hexdigest()


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
        builder = _builder(name, name, self._key.public_key(), life, hosts=(), ca=True)
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
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose

        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [Purpose.CLIENT_AUTH, *([Purpose.SERVER_AUTH] if hosts else [])]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(name, self._name, key.public_key(), self._life, hosts=hosts, ca=False)
        builder = builder.add_extension(_usage(signs=False), True).add_extension(signer, False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
        return KeyPair(_pem(_signed(builder, self._key)), _key_pem(key))


def self_signed(name: str, host: str) -> KeyPair:
    """A new key and its certificate for who listens as ``host`` (a name or an address)."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key.public_key(), LIFE, hosts=(host,), ca=False)
    return KeyPair(_pem(_signed(builder, key)), _key_pem(key))


def _builder(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePublicKey,
    life: datetime.timedelta,
    *,
    hosts: Collection[str],
    ca: bool,
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), True)
    )
    if not hosts:
        return builder
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    return builder.add_extension(names, False)


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _pem(cert: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import serialization

    return cert.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives import serialization

    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem.decode()


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
