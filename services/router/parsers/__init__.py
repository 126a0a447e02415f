"""From the text of a chat's output to what OpenAI's clients see: content, reasoning, tool calls."""
