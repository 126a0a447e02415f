"""The OpenAI-compatible front: HTTP in, DecodeService.Generate out.

    edge/                                   bodies, fields and errors of HTTP; keys, origins, the access log
    openai/ responses/ messages/ native/    an API each: its schema, its routes, its replies
    chat/ parsers/ grammar/                 what they share: chats; calls and thoughts in text; forced forms
    prepare, answer, front                  check, encode, admit, and run a journey per sample
    journey                                 one sample end to end, over all its attempts
    routing/                                admission, placement, and what is known of the workers
    text/                                   text to tokens and back
    trace, timings, metrics, ops/, console/ what can be seen from outside

Imports go down this list only ("inside the router" in pyproject.toml has the exact order). Owns no KV and no
session: cancelling the call to decode ends what was begun there. Runs without torch.
"""
