"""The OpenAI-compatible front: HTTP in, DecodeService.Generate out.

    app, routes_*      what each path takes and answers; http, openai_schema, options, openai_stream under them
    front              checks, encodes, admits a request and runs a journey per sample
    journey, mesh      one sample end to end; what all of them share
    placement          the pure choice of a pair, over the watched table
    tokenizer, chat_template, detokenizer, output_text      text to tokens and back
    admission, rooms, trace, metrics                        bounds, and what can be seen from outside

Owns no KV and no session: cancelling the call to decode ends what was begun there. Runs without torch.
"""
