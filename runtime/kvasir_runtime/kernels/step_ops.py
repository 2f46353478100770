"""The kernels of a step around the decoder, gathered by device: its inputs from the rows, and what sampling needs."""

from dataclasses import dataclass, replace
from functools import partial

from kvasir_runtime.kernels.inputs import (
    LoadInputs,
    PrepareInputs,
    cpu_prepare_inputs,
    load_inputs_reference,
    prepare_inputs_reference,
)
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.sample import (
    Argmax,
    Penalize,
    Sample,
    VerifyDrafts,
    VerifyMostLikely,
    argmax_reference,
    cpu_argmax,
    cpu_sample,
    cpu_verify_drafts,
    verify_drafts_reference,
    verify_most_likely,
)


@dataclass(frozen=True)
class StepOps:
    """Each reference function's docstring gives shapes and effects."""

    prepare_inputs: PrepareInputs
    load_inputs: LoadInputs
    argmax: Argmax
    sample: Sample | None
    """A whole draw; None: by plain torch, as `execution/sampler.py` has it."""
    adjusts_logits: bool
    """Whether `sample` applies penalties, logit_bias and min_tokens; else it takes logits that they have changed."""
    penalize: Penalize | None
    """None: by plain torch, as `execution/logit_adjustments.py` has it."""
    verify_drafts: VerifyDrafts
    verify_most_likely: VerifyMostLikely


def reference_step_ops(*, drops_missing_drafts: bool) -> StepOps:
    """Plain torch, any device, no synchronisation but of `prepare_inputs`."""
    return StepOps(
        prepare_inputs=partial(prepare_inputs_reference, drops_missing_drafts=drops_missing_drafts),
        load_inputs=load_inputs_reference,
        argmax=argmax_reference,
        sample=None,
        adjusts_logits=False,
        penalize=None,
        verify_drafts=verify_drafts_reference,
        verify_most_likely=verify_most_likely(argmax_reference, verify_drafts_reference),
    )


def cpu_step_ops() -> StepOps:
    """The kernels compiled for this CPU, or plain torch where there is no compiler (the log says so)."""
    library = load_library()
    if library is None:
        return reference_step_ops(drops_missing_drafts=True)
    argmax, verify_drafts = cpu_argmax(library), cpu_verify_drafts(library)
    return replace(
        reference_step_ops(drops_missing_drafts=True),
        prepare_inputs=cpu_prepare_inputs(library),
        argmax=argmax,
        sample=cpu_sample(library),
        adjusts_logits=True,
        verify_drafts=verify_drafts,
        verify_most_likely=verify_most_likely(argmax, verify_drafts),
    )
