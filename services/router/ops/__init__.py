"""What operators and collectors ask a router: health, metrics, discovery, drains."""
