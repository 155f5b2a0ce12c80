"""The catalogue of codes: what errors, warnings and the rules of the doctor say for each."""

from __future__ import annotations

from typing import NamedTuple


class CatalogueEntry(NamedTuple):
    """One code: its title, why it is refused, and what to write instead.

    Attributes:
        rule: the name of its rule of the doctor, as `host-read`; empty for a code that is none.
    """

    title: str
    why: str
    fix: str
    rule: str = ""


WAIT = "wait after the call: `y = fast(x); torch.cuda.synchronize()`"
"""The fix for a wait inside of the callable."""

CATALOGUE: dict[str, CatalogueEntry] = {
    # 1xx: refusals of a capture.
    "OL101": CatalogueEntry(
        "host read of a device value",
        "the value exists only once the device has run, and a replay runs no Python that could "
        "wait for it: the branch or number of the capture would be repeated in every call",
        "read it after the call; or keep it on the device, where `torch.where(condition, a, b)` "
        "picks a result after computing both; or decide before the call and pass a bool or "
        "number, of which each value gets a recording",
        rule="host-read",
    ),
    "OL102": CatalogueEntry(
        "output shape depends on data",
        "the size of the result is known only after the device has run, and a recording has fixed "
        "sizes",
        "move the operation out of the callable; or compute at full size and mask: "
        "`torch.where(mask, x, 0)` is right where zeros change nothing, as in a sum, and a mean "
        "divides by `mask.sum()`; or give the size: `torch.nonzero_static(x, size=n)`, `topk(k)`",
        rule="data-dependent-shape",
    ),
    "OL103": CatalogueEntry(
        "copy between host and device",
        "a replay would copy from the same host address again, whatever is stored there by then",
        "copy before the call and after it, `y = fast(x.to(device)).cpu()`; or create the tensor "
        "on the device, with `device=x.device`",
        rule="host-copy",
    ),
    "OL104": CatalogueEntry(
        "host tensor in a device computation",
        "the captured kernels hold the value that the host tensor had during the capture",
        "pass it as an argument on the device: `tensor.to(device)` before the call",
        rule="host-tensor",
    ),
    "OL105": CatalogueEntry(
        "a tensor of the call is kept where a replay cannot renew it",
        "a list, object or closure would keep the tensor of the capture, which every replay "
        "overwrites",
        "return the tensor, and store it after the call; or assign it to an attribute of a "
        "module, `self.last = y`, which each replay assigns again",
        rule="kept-tensor",
    ),
    "OL106": CatalogueEntry(
        "random state changed inside the callable",
        "a replay draws new numbers from the generators that it was captured with; it cannot seed "
        "them, and can set only a state that was saved in the same callable",
        "seed before the call: `torch.manual_seed(seed); fast(x)`",
        rule="random-state",
    ),
    "OL107": CatalogueEntry(
        "sizes or strides of a tensor changed in place",
        "a replay runs kernels; it cannot resize or re-stride a tensor that exists outside of the "
        "callable",
        "another tensor in place of the change: `x = x.t()` for `x.t_()`",
        rule="in-place-resize",
    ),
    "OL108": CatalogueEntry(
        "output of a kind that cannot be rebuilt",
        "each call must return new objects, and an object of this class cannot be made again from "
        "the tensors in it",
        "return tensors, or tuples, lists, dicts and dataclasses of tensors and plain constants: "
        "`tuple(rows)` for `iter(rows)`",
        rule="opaque-output",
    ),
    "OL109": CatalogueEntry(
        "the device refused the capture",
        "the operation is not allowed while a stream is being captured",
        "move the operation out of the callable, or graph the parts before and after it",
        rule="device-refusal",
    ),
    "OL110": CatalogueEntry(
        "the first call makes lasting state",
        "`capture` must leave everything as it found it, and cannot remove state that the "
        "callable makes in its first call, such as an optimizer's moments",
        "call the callable once for real, then `capture`",
        rule="first-call-state",
    ),
    "OL111": CatalogueEntry(
        "out of memory during a capture",
        "the recording's buffers do not fit beside what is allocated",
        "free memory, share a pool between callables (`pool=ol.Pool()`), or graph fewer shapes",
        rule="out-of-memory",
    ),
    "OL112": CatalogueEntry(
        "hook on a tensor or submodule of a captured forward",
        "a replay runs kernels; the hook is Python, and would run in the capture only",
        "return the tensor, and put the hook on the result: `y = fast(x); y.register_hook(hook)`; "
        "hooks on parameters, arguments and the graphed module itself run, too",
        rule="inner-hook",
    ),
    "OL113": CatalogueEntry(
        "a tensor that requires grad is changed in place",
        "autograd would have to see the change on the caller's tensor, and a replay hands it "
        "results only",
        "work on a copy, `x = x.clone()`, and return it",
        rule="in-place-on-grad",
    ),
    "OL114": CatalogueEntry(
        "a tensor that requires grad is out of the capture's reach",
        "the capture replaces the tensor for a moment, and found it in no attribute, list, dict, "
        "closure or global of the callable",
        "keep it in a module or a closure: `lambda x: f(w, x)` instead of `partial(f, w)`",
        rule="unreachable-parameter",
    ),
    "OL115": CatalogueEntry(
        "the gradient of an argument",
        "each call brings other tensors, and a replay writes gradients only to tensors that the "
        "callable reaches by itself",
        "reach a parameter by a module or a closure; hand an input over without a gradient, "
        "`f(x.detach())`, and inside begin with `x = x.detach().requires_grad_()`",
        rule="argument-gradient",
    ),
    "OL116": CatalogueEntry(
        "a backward inside the backward of a captured forward",
        "it adds to the gradients of parameters where a replay does not see it, as a reentrant "
        "checkpoint does",
        "`checkpoint(..., use_reentrant=False)`, or graph the whole training step",
        rule="nested-backward",
    ),
    "OL117": CatalogueEntry(
        "two runs of a call that differ",
        "a replay repeats one run, and two runs of the same call did not do the same work: a "
        "random number of Python or NumPy, a clock, an iterator, a counter or a growing cache "
        "decides what it does",
        "pass what changes as an argument, `fast(x, torch.tensor(value))`; or keep it in a tensor "
        "on the device that is changed in place",
        rule="runs-differ",
    ),
    "OL118": CatalogueEntry(
        "a number that the callable changes for its next call",
        "a replay runs the branches and numbers of its capture, so each value of the number needs "
        "a recording of its own",
        'keep it in a tensor that is changed in place, `self.register_buffer("n", '
        "torch.zeros((), dtype=torch.long))`, and choose by it on the device, `torch.where(self.n "
        "% 2 == 0, a, b)`; or pass it as a 0-dim tensor; or, where a branch asks for it, pass the "
        "answer, a bool, of which each value gets a recording",
        rule="moving-number",
    ),
    "OL119": CatalogueEntry(
        "a mode of torch that the callable leaves changed",
        "a replay runs kernels; it sets no mode, and what comes after the call would run in that "
        "of before it",
        "set it before the call; or for a part of it, `with torch.no_grad():`, which ends there",
        rule="mode-left",
    ),
    "OL120": CatalogueEntry(
        "optimizer that cannot be captured",
        "its step reads or counts on the host, and a replay runs no Python: the count of the "
        "capture would be used in every step",
        "an optimizer with `capturable=True` or `fused=True`: `ol.capturable(optimizer)`",
        rule="host-optimizer",
    ),
    "OL121": CatalogueEntry(
        "GradScaler with an optimizer that is not fused",
        "whether to step is decided on the host, by reading whether a gradient overflowed",
        "a fused optimizer, which decides on the device: `fused=True`",
        rule="unfused-scaler",
    ),
    "OL122": CatalogueEntry(
        "an option of an optimizer set inside the callable",
        "a replay runs no Python that could compute the next value: the captured one would be "
        "used in every step",
        "set it after the call, which reads it each time: `fast(x); scheduler.step()`",
        rule="option-set-inside",
    ),
    "OL123": CatalogueEntry(
        "an optimizer's option that changes at every call",
        "the recorded kernels cannot be given another value of this option, so each value would "
        "need a recording of its own",
        "leave the option as it is, or call `optimizer.step()` after the callable",
        rule="moving-option",
    ),
    "OL130": CatalogueEntry(
        "a wrapper that synchronises gradients",
        "its collectives are started by hooks of autograd, which a recorded backward does not "
        "run: each process would train on its own gradients",
        "graph the module inside the wrapper, or the whole step with its backward and optimizer",
        rule="gradient-sync-wrapper",
    ),
    "OL131": CatalogueEntry(
        "a call that another process does not record",
        "each process of a group has to launch a recording with collectives at the same call, so "
        "all of them record it, or none",
        "change the line of that rank; give every rank the same calls, of the same sizes",
    ),
    "OL140": CatalogueEntry(
        "padding would change a result",
        "a bucket runs at a padded size, which is right only where real rows do not depend on "
        "padded ones",
        "mask the padding (an attention mask, `pad={...: 0}`), or bucket another dimension; "
        "`Buckets(..., independent=True)` skips the check, where you know that the rows are "
        "independent and what the callable writes counts none",
        rule="padding-dependence",
    ),
    # 2xx: refusals of a replay.
    "OL201": CatalogueEntry(
        "the call fits no recording",
        "a replay runs the captured kernels at the captured sizes",
        'drop on_mismatch="raise", so that the new signature gets a recording of its own',
    ),
    "OL202": CatalogueEntry(
        "gradients of gradients",
        "the backward is a recording, and autograd cannot differentiate it",
        "call the module itself where `create_graph=True` is needed, or graph the whole step",
    ),
    "OL210": CatalogueEntry(
        "the call is larger than every bucket",
        "no recording is large enough for it",
        'add a larger size, or ask for overflow="eager" or overflow="chunk"',
    ),
    "OL211": CatalogueEntry(
        "a batcher that takes no more requests",
        "as many requests wait as its `max_waiting` allows, or it was closed",
        "answer that the service is busy, or raise max_waiting; close a batcher after its last "
        "request",
    ),
    # 3xx: warnings: calls that ran eagerly, and effects that replays leave out.
    "OL301": CatalogueEntry(
        "too many signatures",
        "each signature needs a recording of its own, and at most `max_recordings` are made",
        "pass the changing value as a tensor, round sizes up to a few, or raise max_recordings",
    ),
    "OL302": CatalogueEntry(
        "an argument that cannot be compared",
        "a replay is right only for arguments equal to those of the capture, and objects of this "
        "class cannot be compared",
        "pass tensors, numbers, strings and containers of them; bind the rest with "
        "functools.partial",
        rule="incomparable-argument",
    ),
    "OL303": CatalogueEntry(
        "gradients that are not graphed",
        "a recording holds either a forward, whose backward the caller runs, or a whole step, "
        "which runs its own",
        "make the forward and the step two graphed callables",
    ),
    "OL304": CatalogueEntry(
        "the pool is full",
        "this recording alone needs more than the pool's max_bytes",
        "raise max_bytes, or call with smaller sizes",
    ),
    "OL305": CatalogueEntry(
        "too many forwards wait for their backward",
        "each of them keeps a recording with its saved tensors, and `max_in_flight` are allowed",
        "call under torch.no_grad() where no backward follows, in the thread that calls "
        "(asyncio.to_thread has its own grad mode), drop results that require grad, or raise "
        "max_in_flight",
    ),
    "OL306": CatalogueEntry(
        "the backward cannot be captured",
        "an operation in it needs the host; the backward runs operation by operation, after a "
        "forward that is one launch",
        "keep values on the device in custom backwards, or graph the parts before and after them",
        rule="host-backward",
    ),
    "OL307": CatalogueEntry(
        "the callable makes its state anew in each call",
        "a recording fits a call only while the objects that it read are the same, and this "
        "callable replaces or changes them",
        "make such an object once, before the calls, or change it in place",
        rule="renewed-state",
    ),
    "OL308": CatalogueEntry(
        "hooks inside",
        "a replay repeats a hook's tensor operations and stores their results as it did; the rest "
        "of its Python, such as a count or a log, ran in the warm-up and the capture only",
        "put it on the graphed module itself, `fast.register_forward_hook(hook)`; or remove it, "
        "and read the values that it needs from a result",
        rule="hook-inside",
    ),
    "OL309": CatalogueEntry(
        "a list that the callable adds to",
        "a replay runs no Python, so the list, dict or set stays as the capture left it",
        "add it after the call: `y = fast(x); seen.append(value)`",
        rule="growing-list",
    ),
    "OL310": CatalogueEntry(
        "larger than every bucket",
        "no recording is large enough for the call, which ran eagerly",
        'add a larger size, or ask for overflow="chunk"',
    ),
    "OL311": CatalogueEntry(
        "a module that runs in pieces",
        "each of these lines cannot be captured, so the module or function that holds it runs "
        "as it is, one operation after another; its pieces are graphed",
        "move such a line out of it, or write it so that it can be captured: "
        'on_refusal="raise" says how',
    ),
    "OL312": CatalogueEntry(
        "a part of a compiled graph that is not recorded",
        "a recording holds the device's work alone; a part that the host does costs a launch more, "
        "and the host's time for it",
        "move it out of the compiled function, or to the device",
    ),
    "OL313": CatalogueEntry(
        "a graphed callable inside of torch.compile",
        "torch.compile traces through it to what it calls, and uses none of its recordings",
        "`ol.graph(f, compile=True)`, which compiles and records; or "
        '`torch.compile(f, backend="onelaunch")`, which records what Dynamo makes of the callable '
        "itself",
    ),
    "OL314": CatalogueEntry(
        "calls that warm_up left out",
        "a budget was spent, a limit was reached, or the call is refused; a call that was left out "
        "warms up and is captured when it comes, and a refused call raises",
        "raise the budget, or call `warm_up` again, which goes on with the rest; change the line "
        "of a refused call",
    ),
    "OL316": CatalogueEntry(
        "a call that is not compiled later",
        "another thread compiles, and compares with eager, only what changes no state, draws no "
        "random numbers and has no backward",
        "`compile=True`, which compiles in the second call, or leave it: the recording is right",
    ),
    # 4xx: how onelaunch was called.
    "OL401": CatalogueEntry(
        "bad argument to onelaunch",
        "the option or function does not take this value",
        "see its documentation: `help(ol.graph)`, or docs/api.md",
    ),
    "OL402": CatalogueEntry(
        "arguments of different bucketed sizes",
        "padded arguments grow to one bucket together, so they must have one size",
        "name the arguments that are not padded, or whose rows are in another dimension: "
        '`Buckets(..., dims={"weight": None})`',
    ),
    "OL403": CatalogueEntry(
        "a step of the plan does not apply here",
        "a plan holds what was found for one callable on one machine; another may lack the "
        "hardware, a package, or the layers that a step rewrites",
        "leave the step out with `plan.without(...)`, or search anew with `ol.optimize`",
    ),
}
