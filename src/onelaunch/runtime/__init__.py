"""The choice of warm-up, capture, replay or eager for each call, and the memory of recordings.

graphed.py    Graphed: a callable whose calls replay once they can; its kind for some options
candidate.py  a call that may get a recording: the status of its signature, how it is recorded
phase.py      the phase of a call that no recording fits: warm-up, capture, eager or refused
ranks.py      processes that share collectives: all of them record a call, or none
recorder.py   how a callable gets recordings: captured, or taken over from another request's
table.py      the recordings of a callable: added and freed
why.py        why a call that no recording fits needs another one, or gets none
signature.py  the signatures of calls, which decide what a call can replay
notices.py    the warnings of a callable, each given once, and calls that no recording serves
requests.py   objects that a request makes anew and passes to the callable, and their recordings
changing.py   arguments that differ at each call, so that no signature comes again
patience.py   whether another recording pays, after some that did not last
varied.py     numbers that the caller varies, and state that it replaces: inputs of a recording
background.py  captures in a thread of their own, while calls run eagerly
later.py      compiled recordings that take over from eager's, by a thread
forks.py      locks of our threads, and a fork of the process
worker.py     a thread for captures beside calls, and the conditions that they need
warmup.py     the runs before a capture, and the facts that they show
answers.py    the two ways of a callable that asks whether it is being captured, compared
pool.py       `ol.Pool`, and the manager of its memory and budget
stats.py      the cost and use of recordings, as data
service.py    Service: a graphed callable in a service, which captures ahead and tells of itself
batcher.py    `Batcher`: single requests from many threads, run together in batches
readiness.py  the calls that a service was warmed up for, as data
metrics.py    `ol.Metrics`: the figures of callables for Prometheus
progress.py   the bar of a warm-up of a service; the only file that imports rich
options.py    the options of `ol.graph`, checked

The words of this package, beside those of docs/glossary.md:

spec        a signature (`CallSpec`)
status      the facts about a signature: its warm-ups, its refusal, its past recordings
candidate   a call that may get a recording: it warms up its signature, or is captured
recording   the result of a capture. Four classes hold one: `CapturedCall`, for its replays;
            `TableEntry`, with its signature and call path; `PoolMember`, for the pool's budget;
            `Recording`, its figures for users. `CapturedCall.graph` is the device's graph in it
strategy    how sizes are padded in a call; without buckets `UNPADDED`
accesses    the reads and writes of compiled code, as a watched run of the callable showed them
to follow   a number: to read it anew at each call. Otherwise each value has its recording
to take over  a recording: to use one of the last request's with an object of this one's
MISS        the answer of a recording that does not fit a call
to run eagerly  of a call: the callable itself runs, or with `on_refusal="split"` in pieces
to take apart  an object among the arguments: to take its fields for the arguments
ran_differently   of a recording: its run differed, or read more than those before it
capture answer  the answer to code that asks torch whether it is being captured
inline      of a call: it runs eagerly as a part of another run, and is not counted
reached     the state that the callable reads or may change, found from its attributes and names
to rehearse  a callable: to run it once as a warm-up without a call, and put everything back
backoff     the wait of a signature that found no room, until it is tried again
chain       callables that are captured in the order in which they run, to share memory
"""
