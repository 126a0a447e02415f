"""`/generate`, `/tokenize` and `/detokenize`."""
