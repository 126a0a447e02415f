"""The registry of the mesh: rank table, leases, rooms. Soft state, in memory; carries no request.

rank_table and rooms are plain objects under the caller's clock; servicer and main put them on gRPC.
Workers and routers call it through services/worker/registration and roster.
"""
