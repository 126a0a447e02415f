"""The engine core: scheduler, paged KV cache, communication groups, KV transfer, execution.

It imports neither grpc, protobuf nor asyncio, and never the packages above it.
"""
