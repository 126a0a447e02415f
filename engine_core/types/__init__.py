"""Plain data that the whole of pdmesh speaks in: frozen, torch-free, without behaviour beyond checks."""
