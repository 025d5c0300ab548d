"""Replay: a served path walked by the trainer's own forward."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_recipe

from paceline.draft import Draft, read_draft
from paceline.errors import DraftError, ResultError
from paceline.target import TargetFacts
from paceline.train import replay_draft, train_draft
from paceline.train.entry import simulate_draft
from paceline.train.features import load_frozen_target
from paceline.train.replay import load_draft_module, measure_gap, propose, walk_bases

K = 3


@pytest.fixture(scope="module", params=[None, 48])
def draft(
    request: pytest.FixtureRequest,
    target: TargetFacts,
    data_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Draft:
    recipe = make_recipe(draft__draft_vocab_size=request.param, optim__num_steps=60, optim__lr=3e-3)
    out = tmp_path_factory.mktemp("draft") / "draft"
    return train_draft(recipe, target=target, data_dir=data_dir, out_dir=out, device="cpu")


def serve(
    draft: Draft, target: TargetFacts, prompt: list[int], num_output: int
) -> tuple[list[int], list[int], list[int]]:
    """A little greedy server: verify by the target, one base at a time, tokens cut at the limit."""
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    module = load_draft_module(draft)

    def greedy(ids: list[int]) -> int:
        state = frozen.features(torch.tensor([ids]), [1]).final_BTD[0, -1]
        return int((frozen.head_VD @ state).argmax())

    ids, accepted = [*prompt, greedy(prompt)], []
    while len(ids) - len(prompt) < num_output:
        rows, _ = propose(
            module,
            frozen,
            ids=ids,
            bases=[len(ids) - 2],
            aux_layer_ids=[1, 2, 3],
            num_speculative_tokens=K,
        )
        took = 0
        for token in rows[0]:
            right = greedy(ids)
            ids.append(right)
            if token != right:
                break
            took += 1
        else:
            ids.append(greedy(ids))
        accepted.append(took)
    return prompt, ids[len(prompt) : len(prompt) + num_output], accepted


def test_replay_agrees_with_a_server_step_by_step(draft: Draft, target: TargetFacts) -> None:
    texts = [serve(draft, target, [5 + n, 9, 20, 7 + 2 * n], 18 + n) for n in range(6)]
    replay = replay_draft(draft, target, texts, dtype="float32")
    accepted = [took for text in texts for took in text[2]]
    assert sum(accepted) > 0  # a replay of rejections alone would prove nothing
    assert replay.num_agree == replay.num_steps > 20
    assert replay.share == 1.0
    assert replay.gaps == ()
    assert replay.position_served == replay.position_trained
    assert replay.position_1_served == replay.position_1_trained
    assert [len(steps) for steps in replay.proposed] == [len(t[2]) for t in texts]
    for text, steps in zip(texts, replay.proposed, strict=True):
        prompt, output, counts = text
        ids = [*prompt, *output]
        for base, took, row in zip(
            walk_bases(len(prompt), len(output), counts),
            counts,
            steps,
            strict=True,
        ):
            shown = ids[base + 2 : base + 2 + took]
            assert list(row[: len(shown)]) == shown


def test_a_false_record_is_noticed(draft: Draft, target: TargetFacts) -> None:
    texts = [serve(draft, target, [5 + n, 9, 20, 7 + 2 * n], 18) for n in range(6)]
    false = [(prompt, output, [0] * (len(output) - 1)) for prompt, output, _ in texts]
    replay = replay_draft(draft, target, false, dtype="float32")
    assert replay.num_agree < replay.num_steps
    assert replay.position_trained[0] > replay.position_served[0] == 0.0
    assert len(replay.gaps) == replay.num_steps - replay.num_agree
    assert min(replay.gaps) >= 0.0


def test_gap_by_hand(draft: Draft, target: TargetFacts) -> None:
    module = load_draft_module(draft)
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    state = torch.randn(frozen.embedding_VD.shape[1], generator=torch.Generator().manual_seed(3))
    head = frozen.head_VD if module.lm_head is None else module.lm_head.weight
    logits = (head.double() @ state.double()).tolist()
    ids = module.to_target_ids(torch.arange(len(logits))).tolist()
    ranked = sorted(zip(logits, ids, strict=True), reverse=True)
    best, second, fifth = ranked[0], ranked[1], ranked[4]
    measured = measure_gap(module, frozen, state, proposed=best[1], other=None)
    assert measured == pytest.approx(best[0] - second[0], abs=1e-5)
    measured = measure_gap(module, frozen, state, proposed=best[1], other=fifth[1])
    assert measured == pytest.approx(best[0] - fifth[0], abs=1e-5)
    absent = next(iter(set(range(len(frozen.embedding_VD))) - set(ids)), None)
    if absent is not None:
        assert measure_gap(module, frozen, state, proposed=best[1], other=absent) == math.inf


def test_bases_by_hand() -> None:
    # prompt 4, output 8: x[4] from prefill; steps from 3, then 3+1+2=6, then 7, then 11 > end
    assert walk_bases(4, 8, [2, 0, 3]) == [3, 6, 7]
    with pytest.raises(ResultError, match="step 3"):
        walk_bases(4, 8, [2, 0, 3, 0])


def test_nothing_served_is_not_measured(draft: Draft, target: TargetFacts) -> None:
    replay = replay_draft(draft, target, [([5, 6, 7], [8], [])], dtype="float32")
    assert replay.num_steps == 0
    assert replay.share is None
    assert replay.position_1_served is None
    with pytest.raises(ResultError, match="more than"):
        replay_draft(draft, target, [([5, 6, 7], [8, 9], [4])], dtype="float32")


def test_simulation_takes_the_steps_a_server_takes(draft: Draft, target: TargetFacts) -> None:
    texts = [serve(draft, target, [5 + n, 9, 20, 7 + 2 * n], 18) for n in range(6)]
    found = simulate_draft(draft, target, [(p, o) for p, o, _ in texts], dtype="float32")
    for (_, _, served), walked in zip(texts, found, strict=True):
        assert tuple(served[: len(walked) - 1]) == walked[:-1]
        assert len(served) - len(walked) in (0, 1)  # a last step may deliver nothing to judge
    assert simulate_draft(draft, target, [([5, 6], [7])], dtype="float32") == [()]


def test_ends_of_the_drafts_own_are_read(draft: Draft, target: TargetFacts, tmp_path: Path) -> None:
    """Equal to the target's they change nothing; others change what is drafted."""
    from safetensors.torch import load_file, save_file

    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    tensors = load_file(str(Path(draft.path) / "model.safetensors"))
    shared = frozen.embedding_VD.to(torch.bfloat16).contiguous()
    texts = [([5, 6, 7], list(range(8, 40)))]
    found: list[Any] = []
    for name, rows in (("same", shared), ("other", shared.flip(0).contiguous())):
        shutil.copytree(draft.path, tmp_path / name)
        own = {**tensors, "embed_tokens.weight": rows}
        save_file(own, str(tmp_path / name / "model.safetensors"), metadata={"format": "pt"})
        found.append(simulate_draft(read_draft(tmp_path / name), target, texts, dtype="float32"))
        _, states = propose(
            load_draft_module(read_draft(tmp_path / name)),
            frozen,
            ids=[*texts[0][0], *texts[0][1]],
            bases=list(range(2, 30)),
            aux_layer_ids=draft.config["eagle_aux_hidden_state_layer_ids"],
            num_speculative_tokens=3,
        )
        found.append(states)
    plain = simulate_draft(draft, target, texts, dtype="float32")
    assert found[0] == plain
    assert not torch.allclose(found[1], found[3])


def test_a_draft_of_another_shape_is_refused_by_name(draft: Draft, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "own"
    shutil.copytree(draft.path, path)
    tensors = load_file(str(path / "model.safetensors"))
    second = {n.replace("midlayer", "layers.1"): t for n, t in tensors.items() if "midlayer" in n}
    # later layers read the stream alone
    second = {n: t[..., :32].clone() if t.shape[-1] == 64 else t.clone() for n, t in second.items()}
    save_file({**tensors, **second}, str(path / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(DraftError, match=r"has no place for tensor .layers\.1"):
        load_draft_module(read_draft(path))
    (path / "config.json").write_text(json.dumps(config))
    rotary = {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(4)}  # vLLM drops it
    save_file({**tensors, **rotary}, str(path / "model.safetensors"), metadata={"format": "pt"})
    load_draft_module(read_draft(path))
