"""Expiry dates of an etcd's certificates (client, authority, servers), and the warnings for them.

For the supervisor, which checks every hour (job_store.py), and for `realsys doctor`. The warnings
are pure; the servers' certificates are read by a TLS handshake.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from realsys.name_resolve.etcd.access import EtcdAccess

WEEK, DAY = datetime.timedelta(days=7), datetime.timedelta(days=1)
HANDSHAKE_S = 5.0


@dataclass(frozen=True)
class Ending:
    """When a certificate expires.

    Attributes:
        what: the certificate, for people, e.g. ``our certificate (cert_file)``.
    """

    what: str
    at: datetime.datetime


def warning_of(ending: Ending, now: datetime.datetime) -> tuple[int, str]:
    """Returns the severity and text of a certificate's warning: 0 and "" with more than a week
    left, then 1, on the last day 2, and 3 after expiry."""
    left = ending.at - now
    if left > WEEK:
        return 0, ""
    at = ending.at.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    then = "connections to etcd fail after that: renew it"
    if left <= datetime.timedelta(0):
        return 3, f"{ending.what} expired at {at}: connections to etcd fail; renew it"
    if left <= DAY:
        hours = left.total_seconds() / 3600
        return 2, f"{ending.what} expires in {hours:.0f} h, at {at}; {then}"
    return 1, f"{ending.what} expires in {left.days} days, at {at}; {then}"


def endings(access: EtcdAccess) -> list[Ending]:
    """Returns the expiry of every certificate that can be read."""
    if not access.is_encrypted:
        return []
    found = [
        *_of_pem("our certificate (etcd.cert_file)", access.cert_pem),
        *_of_pem("the certificate authority (etcd.ca_file)", access.ca_pem),
    ]
    for endpoint in access.endpoints:
        found += _of_server(endpoint, access)
    return found


def _of_pem(what: str, pem: str | None) -> Iterator[Ending]:
    from cryptography import x509

    if pem is None:
        return
    try:
        read = x509.load_pem_x509_certificates(pem.encode())
    except ValueError:  # gRPC reports it on connecting
        return
    if read:  # of a bundle: the one that is valid longest
        yield Ending(what, max(_end(certificate) for certificate in read))


def _of_server(endpoint: str, access: EtcdAccess) -> list[Ending]:
    """Reads the server's certificate without verifying it; gRPC verifies trust when it connects."""
    from cryptography import x509

    host, _, port = endpoint.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    name = access.server_name or host.strip("[]")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            data = secure.getpeercert(binary_form=True)
    except (OSError, ValueError):  # unreachable, or it requires a client certificate
        return []
    if data is None:
        return []
    certificate = x509.load_der_x509_certificate(data)
    return [Ending(f"the certificate of etcd's member {endpoint}", _end(certificate))]


def _end(certificate: object) -> datetime.datetime:
    end = getattr(certificate, "not_valid_after_utc", None)
    if end is None:  # cryptography before 42
        end = certificate.not_valid_after.replace(tzinfo=datetime.UTC)  # type: ignore[attr-defined]
    assert isinstance(end, datetime.datetime)
    return end
