"""Prompts -> the target's own answers -> token ids with a loss mask."""

from paceline.data.answer import Answering, answer_prompts
from paceline.data.contamination import Overlap, contamination
from paceline.data.conversations import rows_from_conversations
from paceline.data.grammar import CATEGORIES, expand_prompts
from paceline.data.prompt import Prompt
from paceline.data.prompt_set import PromptSet, read_prompts, require_few_rejected
from paceline.data.rows import Row, read_data_record, read_rows
from paceline.data.served import ServedTarget, open_server
from paceline.data.several import DataParallel, open_servers
from paceline.data.show import show_rows
from paceline.data.states import StatesPlan, check_states, plan_states
from paceline.data.tokens import (
    ChatTokenizer,
    Thinking,
    build_requests,
    open_tokenizer,
    plain_thinking,
)

__all__ = [
    "CATEGORIES",
    "Answering",
    "ChatTokenizer",
    "DataParallel",
    "Overlap",
    "Prompt",
    "PromptSet",
    "Row",
    "ServedTarget",
    "StatesPlan",
    "Thinking",
    "answer_prompts",
    "build_requests",
    "check_states",
    "contamination",
    "expand_prompts",
    "open_server",
    "open_servers",
    "open_tokenizer",
    "plain_thinking",
    "plan_states",
    "read_data_record",
    "read_prompts",
    "read_rows",
    "require_few_rejected",
    "rows_from_conversations",
    "show_rows",
]
