"""The one table of draft families: what each is called in vLLM and where its parts live.

Adding a family: a row here, a contract in draft/contracts.py, a file in train/families/.
See CONTRIBUTING.md, "Add a draft family".
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_NUM_SPECULATIVE_TOKENS", "METHODS", "Method"]

# The largest K that is checked, planned and served. vLLM 0.31.0's own sampler ends at 128.
MAX_NUM_SPECULATIVE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Method:
    """One draft family.

    name: the word in spec.json. vllm_method: value of speculative_config.method; ngram and suffix
    run as custom_class, with a class of ours, unless spec.json names vLLM as the proposer.
    has_weights: a folder of this family holds safetensors. contest: allowed by emc2-2027.
    serves: `paceline serve` and `eval` can run it today. trains: `paceline train` can.
    safe_on_hybrid: drafts on every decode step, so a Gated-DeltaNet state is never read stale.
    gpu_runner: vLLM's model runner that serves it on a GPU, "v1" or "v2"; the first waits for the
    device in every step.
    """

    name: str
    vllm_method: str
    has_weights: bool
    contest: bool
    serves: bool
    trains: bool
    safe_on_hybrid: bool
    gpu_runner: str
    summary: str


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="none",
            vllm_method="none",
            has_weights=False,
            contest=False,
            serves=True,
            trains=False,
            safe_on_hybrid=True,
            gpu_runner="v2",
            summary="no speculation: the target alone",
        ),
        Method(
            name="ngram",
            vllm_method="ngram",
            has_weights=False,
            contest=False,
            serves=True,
            trains=False,
            safe_on_hybrid=True,
            gpu_runner="v1",
            summary="copies what followed the same words earlier",
        ),
        Method(
            name="mtp",
            vllm_method="mtp",
            has_weights=True,
            contest=True,
            serves=True,
            trains=True,
            safe_on_hybrid=True,
            gpu_runner="v2",
            summary="the target's own multi-token-prediction layer, run K times",
        ),
        Method(
            name="eagle3",
            vllm_method="eagle3",
            has_weights=True,
            contest=True,
            serves=True,
            trains=True,
            safe_on_hybrid=True,
            gpu_runner="v2",
            summary="one layer on three tapped target layers, run K times",
        ),
        Method(
            name="medusa",
            vllm_method="medusa",
            has_weights=True,
            contest=True,
            serves=True,
            trains=True,
            safe_on_hybrid=True,
            gpu_runner="v1",
            summary="K heads on the target's last hidden state, all in one pass",
        ),
        Method(
            name="draft_model",
            vllm_method="draft_model",
            has_weights=True,
            contest=True,
            serves=True,
            trains=True,
            safe_on_hybrid=True,
            gpu_runner="v2",
            summary="a whole small model of the same vocabulary, run K times",
        ),
        Method(
            name="dflash",
            vllm_method="dflash",
            has_weights=True,
            contest=False,
            serves=True,
            trains=True,
            safe_on_hybrid=True,
            gpu_runner="v2",
            summary="layers on tapped target layers that fill K masked slots in one pass",
        ),
        Method(
            name="suffix",
            vllm_method="suffix",
            has_weights=False,
            contest=False,
            serves=True,
            trains=False,
            safe_on_hybrid=True,
            gpu_runner="v1",
            summary="copies what followed the same suffix in this and earlier answers",
        ),
    )
}
