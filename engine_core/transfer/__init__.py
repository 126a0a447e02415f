"""KV transfer: links between engine processes, transports, copy plans.

Owns sockets, mappings and transfer threads. It takes commands from the engine's loop and reports
events; it decides nothing about requests.

    base        commands, events, the port that the engine's loop sees
    manager     KVTransferManager: the port over one selector thread; links: which there are, how one is dialled
    sender      the writing end: a push thread per link; outgoing: its half of the socket
    acceptor    the door; receiver: the reading end; grants: which bytes a session may write
    copy_plan   two layouts and two block lists become byte copies; native/ copies them; checksum adds them up
    handshake   what both ends of a link prove first; wire: messages and frames
    transport   what a transport is; transports/ shm, tcp, scripted
"""
