"""KV transfer: links between engine processes, transports, copy plans.

Owns sockets, mappings and transfer threads. It takes commands from the engine's loop and reports
events; it decides nothing about requests.
"""
