"""State machines: one file each, an enum and a transition table; only advance() changes a state."""
