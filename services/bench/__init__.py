"""A load test of any OpenAI-compatible server, known by its URL alone: what `pdmesh bench` runs.

The life of a run:

    1. lengths, arrivals, workload   which requests there will be, and when: pure, fixed by a seed
    2. client                        asks the server once what it takes and how many tokens our words make
    3. runner                        sends the requests of each level, closed or open loop
    4. outcome                       what one request gave; whether it met the objectives
    5. summary                       figures of a level from its outcomes: pure
    6. report                        the result as data and JSON; two results against each other
    7. page, charts                  the same as one HTML page; text: as tables for a terminal; live: while it runs

An open loop measures from the moment a request was due, not from when it was sent: a client that falls behind,
or a limit on requests in flight, can't hide the wait (no coordinated omission). A closed loop sends when an
earlier request has ended; both moments are the same there.
"""
