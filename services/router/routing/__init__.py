"""Where a request goes: admission, placement, health of workers, retries."""
