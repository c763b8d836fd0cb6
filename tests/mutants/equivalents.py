"""Drawn mutants that were shown to behave as the source does, each with the reason; they do not count.

The keys are those of operators.key: file, function, operator, code.
"""

from __future__ import annotations

_PLAIN_SIZE = "the kernels of fewer vectors do the same work: only time differs"

EQUIVALENT: dict[str, str] = {
    "alignedserve/scheduling/orders.py | ByOwnPolicy.key | constant +1 | 1.0": (
        "any number above 0 puts requests without an answer behind the others"
    ),
    "alignedserve/schedulers/best_fit.py | _add_window | constant +1 | 1": (
        "`most` returns 0 for a number of tokens above 0 exactly where the next token finds no memory, for any number"
    ),
    "alignedserve/schedulers/aligned.py | _decodes_bound_s | Lt to LtE | promise.next_due_at - now < bound": (
        "a decode that is due just where the bound ends leaves that time or sets no bound: the bound stays"
    ),
    "alignedserve/worker/pool.py | Copy | constant -1 | 0": "each copy whose tokens are counted is given their number",
    "alignedserve/worker/reporting.py | some_of | LtE to Lt | last <= most": (
        "of just as many numbers as a message may have, each is taken either way"
    ),
    "alignedserve/worker/step/waiting_prompts.py | - | constant +1 | 64": (
        "entries that count no more are passed over until they are swept out, which may be one entry later"
    ),
    "decode_worker/running.py | StepEnd.__init__ | statement left out | self._num_alike = 0": (
        "a step has parts, so none is like the empty one before the first charges, which set it"
    ),
    "alignedserve/worker/step/waiting_prompts.py | WaitingPrompts._refile_all | statement left out | "
    "self._filed.clear()": (
        "all that wait, and no others, have entries; each is filed again before anything is asked, in place of the old"
    ),
    "alignedserve/forms/buffers.py | Buffers._prefetch | argument strict left out | "
    "zip(message.entries, message.waits_s, strict=True)": (
        "an assertion: the sender makes both from the same requests"
    ),
    "alignedserve/forms/prefetching.py | Prefetching._expected_waits | argument strict left out | "
    "zip(waiting, waits, strict=True)": ("an assertion: a wait is computed for each that waits"),
    "alignedserve/shell/control.py | Door._serve | GtE to Gt | self._listener.fileno() >= 0": (
        "descriptor 0 is a part's standard input"
    ),
    "alignedserve/engine/sampling/edits.py | _Seen.__init__ | constant +1 | 2": "a third row that nothing uses",
    "alignedserve/engine/models/encoder.py | Encoder._run | constant -1 | 0": "the only text is the first and the last",
    "alignedserve/gateway/http/connections.py | GatewayConnection._unset_deadline | statement left out | "
    "self._deadline = None": "to cancel a timer again changes nothing",
    "alignedserve/engine/device/large_pages.py | Slabs.__init__ | statement left out | self._used = 0": (
        "the first tensor gets a piece of memory, and sets it"
    ),
    "papers/memory/hybrid.py | WeighedMemory.grow | argument strict left out | "
    "zip(decodes, self._stay_as(decodes), strict=True)": "an assertion: there is a kind for each decode",
    "lab/fuzzing/recording.py | first_difference | constant -1 | 0": "a file that was read has a line, which sets it",
    "kernels/native/kernels.py | Native._greedy | constant -1 | 1": (
        "the reference, which is then asked, draws the same tokens: only time differs"
    ),
    "kernels/library.py | _loaded | statement left out | "
    "library.as_kernel.argtypes = [ctypes.c_char_p, ctypes.c_char_p]": "ctypes passes bytes as pointers anyway",
    "kernels/csrc/attention.cpp | - | < to <= | "
    "for (int64_t part = omp_get_thread_num(); part < line.parts; part += omp_get_num_threads())": (
        "the part after the last begins where the line ends: no unit is in it"
    ),
    "kernels/csrc/packed.cpp | - | constant 1 +1 | "
    "int64_t panels = panels_of(*layer), threads = omp_get_max_threads(), parts = 1;": (
        "halves of a panel give the same results as a whole: only time differs"
    ),
    "kernels/csrc/packed.cpp | - | statement left out | go(std::integral_constant<int, PANEL>());": _PLAIN_SIZE,
    "kernels/csrc/packed.cpp | - | statement left out | go(std::integral_constant<int, PANEL / 2>());": _PLAIN_SIZE,
    "kernels/csrc/quantised.cpp | - | constant 0 +1 | "
    "for (int64_t i = 0; i < part.of.group; i += rows.block, ++at, x += rows.block, w += bytes) {": (
        "it only counts blocks: a group has whole ones, each longer than one input"
    ),
    "kernels/csrc/decoder.cpp | - | constant 0 +1 | "
    "layer_norm(dtype, x, nullptr, norm.weight, norm.bias, out, rows, width, width, 0, norm.eps);": (
        "nothing is added, so its stride is not read"
    ),
}
