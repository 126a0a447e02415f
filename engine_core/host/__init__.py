"""The engine process: its loop, and the sockets up to the service process and across to peers."""
