"""Speculative decoding: whether drafts hold, and whether they pay."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import COUNT, SECONDS, SHARE, TOKENS_PER_SECOND, Limits, Query, graph, number
from charts.dashboards.promql import ENGINES, ratio
from charts.dashboards.variables import ENGINES as CHOICES

_DRAFTS = "kvasir_spec_decode_num_drafts_total"
_DRAFTED = "kvasir_spec_decode_num_draft_tokens_total"
_ACCEPTED = "kvasir_spec_decode_num_accepted_tokens_total"
_BY_POSITION = "kvasir_spec_decode_num_accepted_tokens_per_pos_total"
_GENERATED, _STEPS = "kvasir_generation_tokens_total", "kvasir_engine_steps_total"
_ITL = "kvasir_inter_token_latency_seconds"
_NONE = "no drafts"

_NUMBERS = Section(
    "Now",
    [
        number(
            "Drafts that hold", SHARE,
            "Draft tokens accepted, of all drafted. Below a third another method, or fewer tokens "
            "(speculative.numTokens), is mostly better.",
            ratio(ENGINES.rate(_ACCEPTED), ENGINES.rate(_DRAFTED)), Limits(0.5, 0.3, is_floor=True), when_empty=_NONE,
        ),
        number(
            "Tokens a verification gives", COUNT,
            "Accepted ones and the one that the model adds. It is the most by which speculation can be faster.",
            f"1 + {ratio(ENGINES.rate(_ACCEPTED), ENGINES.rate(_DRAFTS))}", when_empty=_NONE,
        ),
        number(
            "Generated tokens", TOKENS_PER_SECOND, "Of all chosen engines. What speculation must raise to pay.",
            ENGINES.rate(_GENERATED),
        ),
        number(
            "Of them drafted", SHARE,
            "Generated tokens that came from drafts. Near 0 with drafts that hold: the engine drafts seldom, because "
            "it does not pay in batches of this size.",
            ratio(ENGINES.rate(_ACCEPTED), ENGINES.rate(_GENERATED)), when_empty=_NONE,
        ),
        number(
            "Time between tokens, p50", SECONDS,
            "Tokens of one verification come together, so speculation shows in p50 more than in p99.",
            ENGINES.quantile(0.5, _ITL), when_empty="no requests",
        ),
        number(
            "Tokens a step", COUNT, "Generated tokens over steps: batch size times tokens a verification.",
            ratio(ENGINES.rate(_GENERATED), ENGINES.rate(_STEPS)), when_empty="no steps",
        ),
    ],
)  # fmt: skip

_HOLD = Section(
    "Whether drafts hold",
    [
        graph(
            "Drafts that hold", SHARE,
            "Accepted of all drafted tokens, by engine. It follows the prompts: code and repeats are easy.",
            Query(ratio(ENGINES.rate(_ACCEPTED, "pod"), ENGINES.rate(_DRAFTED, "pod")), "{{pod}}"), highest=1,
            when_empty=_NONE,
        ),
        graph(
            "By place in the draft", SHARE,
            "How often the first (0), second, ... draft token holds. Where it falls below a tenth, further ones are "
            "wasted: lower speculative.numTokens.",
            Query(
                f"{ENGINES.rate(_BY_POSITION, 'position')} / on () group_left () {ENGINES.rate(_DRAFTS)}",
                "{{position}}",
            ), highest=1, when_empty=_NONE,
        ),
        graph(
            "Tokens a verification gives", COUNT, "By engine, the model's own among them.",
            Query(f"1 + {ratio(ENGINES.rate(_ACCEPTED, 'pod'), ENGINES.rate(_DRAFTS, 'pod'))}", "{{pod}}"),
            when_empty=_NONE,
        ),
    ],
)  # fmt: skip

_PAY = Section(
    "Whether they pay",
    [
        graph(
            "Drafted and accepted", TOKENS_PER_SECOND,
            "Between the two lies what was verified in vain. Drafts stop by themselves where they do not pay.",
            Query(ENGINES.rate(_DRAFTED), "drafted"), Query(ENGINES.rate(_ACCEPTED), "accepted"), when_empty=_NONE,
        ),
        graph(
            "Verifications", COUNT,
            "A second, by engine: drafts of one sequence are verified together. None while requests run: drafting is "
            "switched off.",
            Query(ENGINES.rate(_DRAFTS, "pod"), "{{pod}}"), when_empty=_NONE,
        ),
        graph(
            "Time between tokens", SECONDS,
            "Compare with a time or a revision without speculation. p99 higher and p50 lower is the usual price.",
            Query(ENGINES.quantile(0.5, _ITL), "p50"),
            Query(ENGINES.quantile(0.99, _ITL), "p99"), when_empty="no requests",
        ),
    ],
)  # fmt: skip

SPECULATION = Board(
    "speculation", "Speculation", "Whether drafts hold, and whether they pay.", CHOICES, [_NUMBERS, _HOLD, _PAY]
)
