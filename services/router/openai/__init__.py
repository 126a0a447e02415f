"""The OpenAI API: completions and chat completions, their schemas and replies."""
