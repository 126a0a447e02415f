"""The paged KV cache: block pool, prefix index, per-group managers, the request-level manager, storage."""
