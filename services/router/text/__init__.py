"""Text and tokens: tokenizers, chat templates, incremental detokenisation, stop strings."""
