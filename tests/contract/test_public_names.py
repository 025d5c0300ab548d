"""What each room lets out is pinned here: a name is public only on purpose."""

from __future__ import annotations

import importlib

import pytest

NAMES: dict[str, list[str]] = {
    "data": [
        "CATEGORIES",
        "ChatTokenizer",
        "Overlap",
        "Prompt",
        "PromptSet",
        "Row",
        "Thinking",
        "answer_prompts",
        "build_requests",
        "contamination",
        "expand_prompts",
        "open_tokenizer",
        "read_data_record",
        "read_prompts",
        "read_rows",
        "require_few_rejected",
        "rows_from_conversations",
        "show_rows",
    ],
    "draft": [
        "Contract",
        "Draft",
        "Eagle3Sizes",
        "FolderScan",
        "INDEX_NAME",
        "MtpSizes",
        "SPEC_KEYS",
        "TensorRule",
        "build_contract",
        "build_eagle3_config",
        "build_mtp_config",
        "canonical_name",
        "check_tensors",
        "default_aux_layer_ids",
        "list_bundled",
        "read_aux_layer_ids",
        "read_bytes",
        "read_draft",
        "read_eagle3_sizes",
        "read_mtp_sizes",
        "resolve_draft",
        "scan_folder",
        "stitch_target",
        "write_draft",
    ],
    "eval": [
        "EvalPrompt",
        "add_replay",
        "build_samples",
        "measure_run",
        "read_answers",
        "score_run",
        "write_result",
    ],
    "report": ["build_page", "print_report", "render_score_table", "write_report"],
    "rules": [
        "Limits",
        "Rules",
        "Score",
        "ScoreTerm",
        "compute_score",
        "describe_rules",
        "list_rules",
        "parse_rules",
        "read_rules",
    ],
    "serve": [
        "Plan",
        "VLLM_VERSION",
        "VllmEndpoint",
        "build_plan",
        "check_plan",
        "describe_plan",
        "format_command",
        "serve_http",
        "start",
    ],
    "target": [
        "TargetFacts",
        "cache_folder",
        "describe_target",
        "read_target",
        "resolve_target",
        "verify_target",
    ],
    "train": [
        "DraftShape",
        "Init",
        "LossMix",
        "Optim",
        "Recipe",
        "build_recipe",
        "learning_rate",
        "read_recipe",
        "recipe_sha256",
        "replay_draft",
        "train_draft",
    ],
    "validate": ["Finding", "RULES", "Report", "Rule", "validate_draft"],
}


@pytest.mark.parametrize("room", sorted(NAMES))
def test_public_names(room: str) -> None:
    module = importlib.import_module(f"paceline.{room}")
    assert sorted(module.__all__) == NAMES[room]
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing
