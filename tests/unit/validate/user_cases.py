"""Reports of people whose draft did not work, each as a small folder and its right verdict.

The ids are those of the list of user cases that the project was designed by. A report that only a
run, a plan or a target can express has no row here; its test is in the room that can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_shards,
    encode_bf16,
    encode_d2t,
    encode_t2d,
    random_bf16,
)
from contract_cases import CASES, build_tensors_of, write_folder
from envelopes import build_envelope

__all__ = ["USER_CASES", "UserCase"]

AUX = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARD_1, SHARD_2 = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SHARED_HEAD = {"trained": {"thinking": "none", "lm_head": "shared with the target"}}
NO_D2T = "draft vocabulary is 16 of 64 but there is no d2t"
OF_TARGET = {"tokenizer_sha256": "a" * 64}


@dataclass(frozen=True, kw_only=True)
class UserCase:
    """verdict: of the whole folder. rule, words: a finding that must be there, "" for none.

    target: changes of the toy target; embeddings: seed of a target's own, on disk.
    """

    case: str
    make: Callable[[Path], Path]
    verdict: str
    rule: str = ""
    words: tuple[str, ...] = ()
    target: Mapping[str, Any] = field(default_factory=dict)
    deep: bool = False
    embeddings: int | None = None
    context_tokens: int | None = None


def draft(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, **changes)


def with_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """The weights stay, config.json is another."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_contract(name: str, **changes: Any) -> Callable[[Path], Path]:
    """A sound folder of another family, with other config keys, spec or tensors."""
    (case,) = [case for case in CASES if case.name == name]

    def make(folder: Path) -> Path:
        tensors = build_tensors_of(case)
        write_folder(case, folder, changes.get("tensors", lambda found: found)(tensors))
        config = {**case.config, **changes.get("config", {})}
        with_config(folder, {key: v for key, v in config.items() if v is not REMOVE})
        spec = {"family": case.family, "num_speculative_tokens": changes.get("k", 3)}
        (folder / "spec.json").write_text(json.dumps(spec))
        record = {"name": "d", "trained": {"thinking": "none", "target": OF_TARGET}}
        (folder / "metadata.json").write_text(json.dumps(record))
        return folder

    return make


def cut_shard(folder: Path) -> Path:
    build_shards(folder)
    (folder / SHARD_2).unlink()
    return folder


def over_fp16(folder: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((16, 48)).astype(np.float32)
    values[3, 4] = 70000.0
    return build_draft(folder, tensors={"fc.weight": ("BF16", (16, 48), encode_bf16(values))})


def own_embeddings(record: str | None) -> Callable[[Path], Path]:
    trained = {"thinking": "none", **({"embeddings": record} if record else {})}
    return draft(
        tensors={"embed_tokens.weight": random_bf16(64, 16, seed=2)}, metadata={"trained": trained}
    )


def rotary(recorded: int | None) -> Callable[[Path], Path]:
    return draft(
        config={"head_dim": 8, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
        metadata={"trained": {"thinking": "none", "trained_rotary_dim": recorded}},
    )


def head_dim_removed(folder: Path) -> Path:
    return with_config(build_draft(folder, config={"head_dim": 8}), build_config(head_dim=REMOVE))


def dflash(token: Any) -> Callable[[Path], Path]:
    inner = {"target_layer_ids": [0, 1, 2]}
    if token is not None:
        inner["mask_token_id"] = token
    return of_contract("dflash", config={"dflash_config": inner})


def with_pickle(folder: Path) -> Path:
    (folder / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    return folder


def without_weights(family: str, **settings: Any) -> Callable[[Path], Path]:
    """A folder of spec.json alone."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps({"family": family, **settings}))
        return folder

    return make


def in_path(word: str) -> Callable[[Path], Path]:
    return lambda folder: of_contract("medusa, one output layer")(folder / word / "a")


def head_of(*kept: str) -> Callable[[Path], Path]:
    """An MTP folder of which only the tensors that begin so are left; none for all."""
    return of_contract(
        "mtp, Qwen3.5",
        tensors=lambda found: (
            {
                name: tensor
                for name, tensor in found.items()
                if not kept or (kept != ("-",) and name.startswith(kept))
            }
            or {"other.weight": random_bf16(4, 4, seed=1)}
        ),
    )


(MTP_CASE,) = [case for case in CASES if case.name == "mtp, Qwen3.5"]
LAYER = "mtp.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{letter}_proj" for letter in "qkvo"]
MLP = [f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")]


def of_mtp(*, ignore: list[str] | None = None, layers: int = 1) -> dict[str, Any]:
    """The hybrid toy target, quantized to four bits when it ignores anything."""
    config = {**MTP_CASE.target, "mtp_num_hidden_layers": layers}
    if ignore is not None:
        scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": scheme},
            "ignore": ignore,
        }
    return {"from_config": config}


LEFT_ALONE = ["lm_head", "re:^mtp.*", "re:.*mlp.*"]


def of_hybrid(
    *, packed: tuple[str, ...] = (), attention: bool, ignore: list[str], without: int | None = None
) -> Any:
    """The same target of eight layers (three recurrent, one attention, twice) with its weights.

    packed: projections of recurrent layers that are stored packed; attention: so are q, k, v, o.
    """
    config = of_mtp(ignore=ignore)["from_config"]
    config |= {
        "num_hidden_layers": 8,
        "layer_types": 2 * (["linear_attention"] * 3 + ["full_attention"]),
    }
    ends = ("lm_head.weight", "model.embed_tokens.weight")
    tensors: dict[str, Any] = {name: random_bf16(256, 64, seed=9) for name in ends}
    for layer, kind in enumerate(config["layer_types"]):
        if layer == without:
            continue
        if kind == "linear_attention":
            names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
            place, stored = f"model.layers.{layer}.linear_attn", packed
        else:
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            place, stored = f"model.layers.{layer}.self_attn", names if attention else ()
        for name in names:
            if name in stored:
                tensors[f"{place}.{name}.weight_packed"] = ("I32", (4, 1), b"\1" * 16)
                tensors[f"{place}.{name}.weight_scale"] = random_bf16(4, 1, seed=1)
            else:
                tensors[f"{place}.{name}.weight"] = random_bf16(4, 8, seed=layer)
    return {"from_config": config, "tensors": tensors}


WIDE = {"hidden_size": 64, "vocab_size": 256, "num_tokenizer_tokens": 250, "eos_token_ids": (2,)}
ONE_HEAD = "medusa, one output layer"


def row(
    case: str, make: Callable[[Path], Path], verdict: str, rule: str = "", *words: str, **more: Any
) -> UserCase:
    return UserCase(case=case, make=make, verdict=verdict, rule=rule, words=words, **more)


USER_CASES: tuple[UserCase, ...] = (
    # vocabulary
    row("U01 no map", draft(tensors={"d2t": REMOVE, "t2d": REMOVE}), "fail", "ten.missing", NO_D2T),
    row("U01 control", draft(config={"draft_vocab_size": 64}, metadata=SHARED_HEAD), "pass"),
    row(
        "U02a ids for offsets",
        draft(tensors={"d2t": encode_d2t(list(range(16))), "t2d": encode_t2d(range(16))}),
        "fail",
        "ten.t2d",
        "0, 2, 4",
        "disagree with t2d at 15 of 16 positions",
        "looks like absolute ids",
    ),
    row(
        "U02b identity",
        draft(tensors={"d2t": encode_d2t([0] * 16), "t2d": encode_t2d(range(16))}),
        "pass",
    ),
    row(
        "U02c out of range",
        draft(tensors={"d2t": encode_d2t([0] * 15 + [60]), "t2d": REMOVE}),
        "fail",
        "ten.d2t",
        "draft id 15 to target id 75",
    ),
    row(
        "U04 padded sizes",
        of_contract("draft_model, Llama"),
        "fail",
        "cfg.vocab",
        "tokenizers identical (250 tokens), padded sizes differ 256 vs 288",
        "Pad or cut",
        "use_heterogeneous_vocab",
        target={**WIDE, "vocab_size": 288},
    ),
    row("U06 no mask token", dflash(None), "fail", "cfg.mask", "names no mask token", target=WIDE),
    row("U06 mask is the end", dflash(2), "warn", "cfg.mask", "end or padding token", target=WIDE),
    row("U06 mask beyond", dflash(256), "fail", "cfg.mask", "no row in an embedding", target=WIDE),
    row("U06 reserved mask", dflash(254), "pass", target=WIDE),
    # weights and shapes
    row(
        "U07 random embeddings",
        own_embeddings("shared with the target"),
        "fail",
        "ten.embed",
        "record says the embeddings are shared",
        "64 of 64 rows",
        deep=True,
        embeddings=1,
    ),
    row("U07 same", own_embeddings("shared with the target"), "pass", deep=True, embeddings=2),
    row("U07 no record", own_embeddings(None), "warn", "ten.embed", deep=True, embeddings=1),
    row(
        "U08a borrowed head",
        draft(config={"draft_vocab_size": 64}),
        "warn",
        "ten.lm_head",
        "will borrow the target's head",
    ),
    row(
        "U08b no head",
        draft(tensors={"lm_head.weight": REMOVE}),
        "fail",
        "ten.missing",
        "cannot stand in for 16 rows",
    ),
    row(
        "U08c head of another size",
        draft(tensors={"lm_head.weight": random_bf16(64, 16, seed=1)}),
        "fail",
        "ten.shape",
        "draft_vocab_size 16",
    ),
    row("U08d own head", draft(), "pass"),
    row("U09 head_dim stated", draft(config={"head_dim": 8}), "pass"),
    row(
        "U09 head_dim removed",
        head_dim_removed,
        "fail",
        "ten.shape",
        "q_proj",
        "rows 32, config implies 16",
    ),
    row("U11a three taps", draft(), "pass"),
    row(
        "U11b two taps for three",
        draft(config={AUX: [1, 2], "num_aux_hidden_states": 2}, weights_follow_config=False),
        "fail",
        "ten.shape",
        "fc expects 3 x 16 inputs, got 2 ids",
    ),
    row("U11c boundary", draft(config={AUX: [1, 2, 4]}), "pass", "cfg.aux", "final boundary"),
    row("U11d beyond", draft(config={AUX: [1, 2, 5]}), "fail", "cfg.aux", "has 4 layers"),
    row(
        "U11e no ids",
        draft(config={AUX: REMOVE, "num_aux_hidden_states": REMOVE}),
        "warn",
        "cfg.aux",
        "vLLM would take [2, 15, 27]",
        target={"num_hidden_layers": 30, "layer_types": ()},
    ),
    row("U13 over fp16", over_fp16, "warn", "ten.fp16", "1 value exceeds", deep=True),
    row(
        "U14 tensor not in its shard",
        lambda folder: build_shards(folder, index={"mtp.fc.weight": SHARD_2}),
        "fail",
        "idx.complete",
        f"promises tensor 'mtp.fc.weight' in '{SHARD_2}', whose header lacks it",
    ),
    row("U14 shard deleted", cut_shard, "fail", "idx.base", f"shard '{SHARD_2}' is not in the"),
    row(
        "U14 tensor in another shard",
        lambda folder: build_shards(folder, index={"fc.weight": SHARD_2}),
        "fail",
        "idx.complete",
        f"lives in '{SHARD_1}', but the index says '{SHARD_2}'",
    ),
    row("U16 no MTP tensors", head_of("-"), "fail", "ten.missing", "mtp.", target=of_mtp()),
    row("U16 only fc", head_of("mtp.fc"), "fail", "ten.missing", LAYER, target=of_mtp()),
    row("U16 complete", head_of(), "pass", target=of_mtp()),
    row(
        "U16 a decoder layer of the target is absent",
        head_of(),
        "fail",
        "ten.missing",
        "counts 8 layers and has no tensor of 1 of them: 3",
        target=of_hybrid(attention=True, ignore=[*LEFT_ALONE, "re:.*linear_attn.*"], without=3),
    ),
    # positions
    row("U17 trained full", rotary(8), "fail", "cfg.rope", "trained with 8", "config gives 2"),
    row("U17 as recorded", rotary(2), "pass"),
    row("U17 no record", rotary(None), "warn", "cfg.rope", "record does not say"),
    row(
        "U18 long context",
        draft(),
        "warn",
        "cfg.pos",
        "32,768 positions",
        "131,072",
        "stops drafting once a sequence passes 32,765 tokens",
        target={"max_position_embeddings": 131_072},
        context_tokens=131_072,
    ),
    # quantized targets
    row(
        "U20a nothing ignored",
        head_of(),
        "fail",
        "q.target",
        "8 matrices",
        "mtp.fc",
        f"{LAYER}.mlp.up_proj",
        target=of_mtp(ignore=["lm_head"]),
    ),
    row(
        "U20b MLP forgotten",
        head_of(),
        "fail",
        "q.target",
        "3 matrices",
        f"{LAYER}.mlp.down_proj",
        target=of_mtp(ignore=["mtp.fc", *ATTENTION]),
    ),
    row(
        "U20c all by parts",
        head_of(),
        "warn",
        "q.target",
        "by their parts",
        target=of_mtp(ignore=["mtp.fc", *ATTENTION, *MLP]),
    ),
    row("U20c by pattern", head_of(), "pass", target=of_mtp(ignore=["re:^mtp.*"])),
    # a hybrid target quantised the wrong way
    row(
        "U22a recurrent layers plain and listed",
        head_of(),
        "pass",
        target=of_hybrid(attention=True, ignore=[*LEFT_ALONE, "re:.*linear_attn.*"]),
    ),
    row(
        "U22b a and b plain, qkv and z packed, listed",
        head_of(),
        "pass",
        "q.target",
        "builds the two pairs apart and supports it",
        target=of_hybrid(
            packed=("in_proj_qkv", "in_proj_z", "out_proj"),
            attention=True,
            ignore=[*LEFT_ALONE, "re:.*in_proj_a$", "re:.*in_proj_b$"],
        ),
    ),
    row(
        "U22c a and b packed",
        head_of(),
        "warn",
        "q.target",
        "12 of its recurrence's small projections",
        target=of_hybrid(
            packed=("in_proj_qkv", "in_proj_z", "out_proj", "in_proj_a", "in_proj_b"),
            attention=True,
            ignore=LEFT_ALONE,
        ),
    ),
    row(
        "U22d attention packed but listed as plain",
        head_of(),
        "fail",
        "q.target",
        "stores 8 layers packed that its ignore list has vLLM build in 16 bits",
        "layers.3.self_attn.q_proj",
        target=of_hybrid(
            attention=True, ignore=[*LEFT_ALONE, "re:.*linear_attn.*", "re:.*self_attn.*"]
        ),
    ),
    row(
        "U22 recurrent layers plain and not listed",
        head_of(),
        "fail",
        "q.target",
        "stores 30 layers 16 bits that its ignore list has vLLM build packed",
        target=of_hybrid(attention=True, ignore=LEFT_ALONE),
    ),
    # K
    row(
        "U31 K of two layers",
        of_contract("mtp, Qwen3.5", config={"mtp_num_hidden_layers": 2}),
        "fail",
        "cfg.mtp_div",
        "K = 3 is not a multiple of 2",
        target=of_mtp(),
    ),
    *(
        row(
            f"U31 two layers, K = {k}",
            of_contract("mtp, Qwen3.5", k=k, config={"mtp_num_hidden_layers": 2}),
            "fail",
            "cfg.missing",
            "runs the first layer alone",
            target=of_mtp(),
        )
        for k in (1, 2, 4)
    ),
    row(
        "U31 two layers of two, K = 1",
        of_contract("mtp, Qwen3.5", k=1, config={"mtp_num_hidden_layers": 2}),
        "warn",
        "cfg.contract",
        "2 layers at K = 1, of which vLLM runs the first",
        target=of_mtp(layers=2),
    ),
    row(
        "U31 two layers of two, K = 2",
        of_contract("mtp, Qwen3.5", k=2, config={"mtp_num_hidden_layers": 2}),
        "fail",
        "cfg.missing",
        "runs the first layer alone",
        target=of_mtp(layers=2),
    ),
    row("U31 block", of_contract("dflash", k=15, config={"block_size": 16}), "pass", target=WIDE),
    row(
        "U31 beyond the block",
        of_contract("dflash", k=16, config={"block_size": 16}),
        "warn",
        "k.range",
        "the block of 16",
        "1 to 15",
        target=WIDE,
    ),
    row(
        "U31 heads",
        of_contract(ONE_HEAD, k=4),
        "fail",
        "cfg.medusa",
        "3 heads for K = 4",
        target=WIDE,
    ),
    row("U31 spare heads", of_contract(ONE_HEAD, k=2), "warn", "cfg.medusa", target=WIDE),
    row(
        "U32e a method in the path",
        in_path("eagle3-vs-medusa"),
        "pass",
        "fs.path",
        "the path holds 'eagle3'",
        target=WIDE,
    ),
    row("U32b suffix without K", without_weights("suffix"), "fail", "k.range", "is missing"),
    row(
        "U32c n-grams the wrong way round",
        without_weights(
            "ngram", num_speculative_tokens=3, prompt_lookup_min=5, prompt_lookup_max=3
        ),
        "fail",
        "spec.keys",
        "shortest n-gram is longer",
    ),
    row("U32d n-grams by default", without_weights("ngram", num_speculative_tokens=3), "pass"),
    row(
        "U32f unknown key",
        without_weights("ngram", num_speculative_tokens=3, window=3),
        "fail",
        "spec.keys",
        "'window' is not a setting of family ngram",
    ),
    row(
        "later: Medusa with residual blocks alone",
        of_contract(
            ONE_HEAD,
            tensors=lambda found: {k: v for k, v in found.items() if "lm_head" not in k},
        ),
        "fail",
        "ten.missing",
        "never lends Medusa the target's head",
        target=WIDE,
    ),
    row(
        "later: a mask embedding beside DFlash, as vLLM would unpickle it",
        lambda folder: with_pickle(of_contract("dflash")(folder)),
        "fail",
        "fs.pickle",
        "row of the mask token in an embed_tokens.weight",
        target=WIDE,
    ),
    row(
        "later: EAGLE-3 as speculators saves it",
        lambda folder: build_envelope(folder, auto_map=REMOVE),
        "warn",
        "fs.missing",
        "no metadata.json",
    ),
    row(
        "later: the cache's dtype inside a draft",
        draft(config={"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}),
        "fail",
        "q.nokv",
        "dtype of the key-value cache",
    ),
    row(
        "later: the target was tuned after the draft",
        draft(),
        "warn",
        "meta.target",
        "trained for another target: its weights",
        target={"weights_fingerprint": "9" * 64},
    ),
)
