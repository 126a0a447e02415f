"""The mesh: router, Bootstrap, prefill and decode as asyncio services around the engine core."""
