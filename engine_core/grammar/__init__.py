"""Grammars that outputs follow: compiled by llguidance, one matcher per session, masks beside the forward."""
