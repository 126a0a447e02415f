"""What every process of the mesh stands on: gRPC servers and channels, tasks with owners, errors, logs.

Knows nothing of workers, tables or requests; everything else in services/ calls it.
"""
