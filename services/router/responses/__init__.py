"""OpenAI's /v1/responses, without a store: what a request says is all that is known of the conversation."""
