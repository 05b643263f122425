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

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose
from cryptography.x509.oid import NameOID

from realsys.trial.folders import write_private

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
        self._key = ec.generate_private_key(ec.SECP256R1())
        key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._life = life
        builder = _builder(name, name, self._key.public_key(), life, hosts=(), ca=True)
        builder = builder.add_extension(_usage(signs=True), True).add_extension(key_id, False)
        self._cert = builder.sign(self._key, hashes.SHA256())
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
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [Purpose.CLIENT_AUTH, *([Purpose.SERVER_AUTH] if hosts else [])]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(name, self._name, key.public_key(), self._life, hosts=hosts, ca=False)
        builder = builder.add_extension(_usage(signs=False), True).add_extension(signer, False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
        return _pair(builder.sign(self._key, hashes.SHA256()), key)


def self_signed(name: str, host: str) -> KeyPair:
    """A new key and its certificate for who listens as ``host`` (a name or an address)."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key.public_key(), LIFE, hosts=(host,), ca=False)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def _builder(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePublicKey,
    life: datetime.timedelta,
    *,
    hosts: Collection[str],
    ca: bool,
) -> x509.CertificateBuilder:
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


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()


def _pair(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, pkcs8, plain)
    return KeyPair(_pem(cert), pem.decode())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
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
