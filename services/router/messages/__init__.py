"""Anthropic's /v1/messages, on the same core as chats."""
