"""Calls gRPC methods knowing nothing but a server's address: what it can do comes from its reflection."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class Reflected:
    """One server, synchronously. Its messages live in a pool of their own, beside those that are imported."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool = DescriptorPool(self._database)

    def __enter__(self) -> Reflected:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._channel.close()

    def services(self) -> set[str]:
        """Full names."""
        return set(self._database.get_services())

    def methods(self, service: str) -> set[str]:
        """Names of a service's methods; their messages resolve."""
        found = self._pool.FindServiceByName(service).methods
        assert all(method.input_type.full_name and method.output_type.full_name for method in found)
        return {method.name for method in found}

    def call(self, service: str, method: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One unary call, JSON in and out."""
        described = self._pool.FindServiceByName(service).FindMethodByName(method)
        kinds = [message_factory.GetMessageClass(kind) for kind in (described.input_type, described.output_type)]
        path = f"/{service}/{method}"
        call = self._channel.unary_unary(path, kinds[0].SerializeToString, kinds[1].FromString)
        answer = call(json_format.ParseDict(request or {}, kinds[0]()), timeout=20.0)
        return json_format.MessageToDict(answer, preserving_proto_field_name=True)
