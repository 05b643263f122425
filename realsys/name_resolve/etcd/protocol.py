"""etcd's messages and RPCs, taken from the package etcd3 for any installed protobuf.

etcd3 0.12.0 was generated in 2020 and does not import with protobuf 4 and later ("Descriptors
cannot be created directly"). Its generated files contain the compiled ``.proto`` files as text,
which stay valid: they are extracted here and loaded into a descriptor pool of their own, because
their names (``rpc.proto``) are not unique to etcd. etcd3 itself is never imported; see
docs/decisions/0001-etcd-client.md. The only module that imports gRPC's Python package by name.
"""

from __future__ import annotations

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pool, message_factory

from realsys.api.errors import ConfigError

# Failures are raised as errors; without this gRPC also prints each one to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc as grpc  # reads the variable

PACKAGE, FILES = "etcd3", ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")  # each needs those before it
_COMPILED = re.compile(r"^\s*serialized_pb=_b\((?P<literal>.*)\)$", re.MULTILINE)


class Method(NamedTuple):
    """One RPC: its path and how its messages are serialised."""

    path: str
    to_bytes: Any  # of the request
    from_bytes: Any  # of the reply


def _load() -> descriptor_pool.DescriptorPool:
    spec = find_spec(PACKAGE)  # does not import a top-level package
    pool = descriptor_pool.DescriptorPool()
    try:
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"no package {PACKAGE!r}")
        for name in FILES:
            text = (Path(spec.origin).parent / "etcdrpc" / name).read_text(encoding="utf-8")
            compiled = _COMPILED.search(text)
            if compiled is None:
                raise ValueError(f"{name} holds no compiled messages")
            pool.AddSerializedFile(ast.literal_eval(compiled["literal"]).encode("latin1"))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"etcd's messages can't be loaded: {error}",
            where=f"package {PACKAGE} in this Python",
            fix="install etcd3 0.12.0, whose generated messages realsys uses: pip install etcd3==0.12.0",
        ) from error
    return pool


_pool = _load()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"etcdserverpb.{name}"))


def _method(service: str, name: str) -> Method:
    described = _pool.FindMethodByName(f"etcdserverpb.{service}.{name}")
    request = message_factory.GetMessageClass(described.input_type)
    reply = message_factory.GetMessageClass(described.output_type)
    path = f"/etcdserverpb.{service}/{name}"
    return Method(path, request.SerializeToString, reply.FromString)


RangeRequest = _message("RangeRequest")
PutRequest = _message("PutRequest")
DeleteRangeRequest = _message("DeleteRangeRequest")
Compare = _message("Compare")
RequestOp = _message("RequestOp")
TxnRequest = _message("TxnRequest")
LeaseGrantRequest = _message("LeaseGrantRequest")
LeaseKeepAliveRequest = _message("LeaseKeepAliveRequest")
LeaseRevokeRequest = _message("LeaseRevokeRequest")
LeaseTimeToLiveRequest = _message("LeaseTimeToLiveRequest")
WatchCreateRequest = _message("WatchCreateRequest")
WatchRequest = _message("WatchRequest")
AuthenticateRequest = _message("AuthenticateRequest")
AuthUserAddRequest = _message("AuthUserAddRequest")
AuthUserGrantRoleRequest = _message("AuthUserGrantRoleRequest")
AuthEnableRequest = _message("AuthEnableRequest")

RANGE = _method("KV", "Range")
TXN = _method("KV", "Txn")
GRANT = _method("Lease", "LeaseGrant")
KEEP_ALIVE = _method("Lease", "LeaseKeepAlive")
REVOKE = _method("Lease", "LeaseRevoke")
TIME_TO_LIVE = _method("Lease", "LeaseTimeToLive")
WATCH = _method("Watch", "Watch")
AUTHENTICATE = _method("Auth", "Authenticate")
USER_ADD = _method("Auth", "UserAdd")
USER_GRANT_ROLE = _method("Auth", "UserGrantRole")
AUTH_ENABLE = _method("Auth", "AuthEnable")
