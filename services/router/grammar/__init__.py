"""What clients write as structured output, made a grammar and judged before anything starts."""
