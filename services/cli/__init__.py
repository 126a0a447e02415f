"""The command `pdmesh`: one module per kind of command.

    main        the application; errors become one line and an exit code
    options     flags made of a configuration class
    single      bootstrap, router, prefill, decode: one service each
    bench       a load test of any OpenAI-compatible server
    handshake   what a service tells the process that started it
    serve       the whole mesh on this machine; supervisor keeps its processes running
    status      the rank table, asked live; explain: one request's timeline
    model       models to try things on; model_path: what --model may name

Exit codes: 0 done, 1 failed while running, 2 wrong options, configuration or model files.
Nobody imports this package.
"""
