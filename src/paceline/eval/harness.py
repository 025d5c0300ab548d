"""lm-evaluation-harness asks a served model: its prompts, its extraction, its scoring.

The harness never sees an engine: its model here is a `Converse`. What it leaves out is kept beside
it, question by question: whether the answer was cut, and whether anything could be read in it.
Questions come from the harness's own data sets, or from files in the same columns.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import DataError, MissingExtraError
from paceline.eval.conversing import Converse, Reply
from paceline.eval.quality import Outcome
from paceline.records import read_jsonl, sha256_file
from paceline.rules import QualityGate

__all__ = ["BUNDLED_QUESTIONS", "AskedQuestion", "ask_task", "hash_questions"]

BUNDLED_QUESTIONS = Path(str(resources.files("paceline.eval") / "questions"))
# the columns of each data set that its task reads
_COLUMNS = {
    "mmlu_pro": ("question", "options", "answer", "category"),
    "ifeval": ("key", "prompt", "instruction_id_list", "kwargs"),
    "gpqa_diamond": (
        "Question",
        "Correct Answer",
        "Incorrect Answer 1",
        "Incorrect Answer 2",
        "Incorrect Answer 3",
    ),
}
# where the harness keeps the tasks of each gate
_FOLDERS = {"mmlu_pro": "mmlu_pro", "ifeval": "ifeval", "gpqa_diamond": "gpqa"}
_INVALID = "[invalid]"  # the harness's word for an answer in which nothing was found
# instructions whose check splits sentences or words with NLTK's punkt tables
_NEEDS_PUNKT = (
    "length_constraints:number_sentences",
    "change_case:capital_word_frequency",
    "startend:end_checker_sentences",
)


@dataclass(frozen=True, kw_only=True)
class AskedQuestion:
    """question_id: task and number in its data set; prompt_sha256: of the whole conversation."""

    question_id: str
    prompt_sha256: str
    outcome: Outcome
    num_tokens: int | None
    has_thought: bool
    text: str


def ask_task(
    converse: Converse,
    name: str,
    gate: QualityGate,
    *,
    questions: Path | None,
    max_tokens: int,
    limit: int | None = None,
) -> list[AskedQuestion]:
    """Every question of one gate's task, asked and scored by the harness.

    questions: a folder `<name>/{test,validation,train}.jsonl` in the data sets' own columns; None
    takes the data sets from the Hugging Face Hub. limit: the first so many of each (sub)task.
    Raises MissingExtraError, DataError; what `converse` raises passes through.
    """
    harness = _import_harness()
    with _quiet(), tempfile.TemporaryDirectory() as cache:
        manager = _index_tasks(_FOLDERS[name])
        if gate.task not in manager.task_index:
            manager = _index_tasks(None)
        tasks = (
            [gate.task]
            if questions is None
            else _local_tasks(name, gate, questions / name, Path(cache), manager)
        )
        model = _build_model(converse, max_tokens)
        try:
            found = harness.simple_evaluate(
                model=model,
                tasks=tasks,
                task_manager=manager,
                limit=limit,
                log_samples=True,
                apply_chat_template=True,
                fewshot_as_multiturn=False,
                bootstrap_iters=0,
            )
        except (KeyError, ValueError, FileNotFoundError, ConnectionError, LookupError) as problem:
            first = str(problem).strip().split("\n")[0]
            raise DataError(
                f"lm-evaluation-harness cannot run the task: {type(problem).__name__}: {first}",
                where=gate.task,
                fix="" if questions else "Without the Hub, name a folder with --questions.",
            ) from problem
    rows = [
        _read_sample(task, sample, model.replies, gate)
        for task, samples in found["samples"].items()
        for sample in samples
        if gate.filter in (sample["filter"], "none")
    ]
    if not rows or len({row.question_id for row in rows}) != len(rows):
        raise DataError(
            f"the task has no filter {gate.filter!r}, or several answers a question",
            where=gate.task,
            fix="Name the task's own filter in the challenge's file.",
        )
    return rows


def hash_questions(questions: Path, name: str) -> dict[str, str]:
    """File -> sha256 of one gate's local questions."""
    return {path.name: sha256_file(path) for path in sorted((questions / name).glob("*.jsonl"))}


def _read_sample(
    task: str,
    sample: Mapping[str, Any],
    replies: Mapping[tuple[str, int], Reply],
    gate: QualityGate,
) -> AskedQuestion:
    number = int(sample["doc_id"])
    reply = replies[task, number]
    if gate.metric not in sample:
        known = ", ".join(str(word) for word in sample["metrics"])
        raise DataError(f"the task has no metric {gate.metric!r}", where=task, expected=known)
    taken = sample["filtered_resps"]
    while isinstance(taken, list) and taken:
        taken = taken[0]
    if reply.is_cut:
        outcome: Outcome = "cut"
    elif not reply.text or taken == _INVALID:
        outcome = "broken"
    else:
        outcome = "right" if float(sample[gate.metric]) == 1.0 else "wrong"
    asked = json.dumps(sample["arguments"], sort_keys=True, default=str)
    return AskedQuestion(
        question_id=f"{task}/{number}",
        prompt_sha256=hashlib.sha256(asked.encode()).hexdigest(),
        outcome=outcome,
        num_tokens=reply.num_tokens,
        has_thought=reply.has_thought,
        text=reply.text,
    )


def _build_model(converse: Converse, max_tokens: int) -> Any:
    from lm_eval.api.model import LM

    class ServedModel(LM):  # type: ignore[misc]
        """replies: (task, number of the question) -> what was answered."""

        tokenizer_name = "the served model's own"

        def __init__(self) -> None:
            super().__init__()
            self.replies: dict[tuple[str, int], Reply] = {}

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [json.loads(request.args[0]) for request in requests]
            texts = []
            for request, reply in zip(requests, converse(asked, max_tokens), strict=True):
                kept = _stop(reply, request.args[1].get("until") or [])
                self.replies[request.task_name, request.doc_id] = kept
                texts.append(kept.text)
            return texts

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return json.dumps(chat_history)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return ""

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise ValueError("the task wants likelihoods, which a chat server does not give")

        loglikelihood_rolling = loglikelihood

    return ServedModel()


def _stop(reply: Reply, until: list[str] | str) -> Reply:
    """The answer up to the task's own stop text; one that reached it is finished, not cut."""
    words = [until] if isinstance(until, str) else until
    ends = [end for end in (reply.text.find(word) for word in words if word) if end >= 0]
    if not ends:
        return reply
    return Reply(
        text=reply.text[: min(ends)].strip(),
        is_cut=False,
        num_tokens=reply.num_tokens,
        has_thought=reply.has_thought,
    )


def _local_tasks(
    name: str, gate: QualityGate, folder: Path, cache: Path, manager: Any
) -> list[str]:
    """Paths of task files: each the harness's own, its data set replaced by local files."""
    files = {path.stem: str(path.resolve()) for path in sorted(folder.glob("*.jsonl"))}
    wanted = {"mmlu_pro": ("test", "validation")}.get(name, ("train",))
    for split in wanted:
        if split not in files:
            raise DataError(
                "there are no questions",
                where=str(folder / f"{split}.jsonl"),
                expected="JSON lines",
            )
    rows = {split: read_jsonl(files[split], error=DataError) for split in wanted}
    for split, found in rows.items():
        for number, row in enumerate(found, 1):
            missing = [key for key in _COLUMNS[name] if key not in row]
            if missing:
                raise DataError(
                    f"column {missing[0]!r} is missing",
                    where=f"{files[split]}:{number}",
                    expected=", ".join(_COLUMNS[name]),
                )
    if name == "mmlu_pro":
        subjects = sorted({str(row["category"]).replace(" ", "_") for row in rows["test"]})
        tasks = [f"{gate.task}_{subject}" for subject in subjects]
    else:
        _require_punkt(rows["train"], str(folder))
        tasks = [gate.task]
    paths = []
    for task in tasks:
        entry = manager.task_index.get(task)
        if entry is None or entry.yaml_path is None:
            raise DataError(f"lm-evaluation-harness has no task {task!r}", where=str(folder))
        config = {
            "include": str(entry.yaml_path),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: files[split] for split in wanted},
                "cache_dir": str(cache / "data"),
            },
        }
        path = cache / f"{task}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        paths.append(str(path))
    return paths


def _require_punkt(rows: list[dict[str, Any]], where: str) -> None:
    _import_without_download()
    needed = {word for row in rows for word in row.get("instruction_id_list", ())}
    if needed.isdisjoint(_NEEDS_PUNKT):
        return
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise DataError(
            f"checking {sorted(needed.intersection(_NEEDS_PUNKT))[0]} needs NLTK's punkt_tab",
            where=where,
            fix="Run `python -m nltk.downloader punkt_tab` where there is a network.",
        ) from None


def _import_without_download() -> None:
    """Local questions do not touch the network: importing these checks would, for NLTK's tables."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"  # the harness downloads in the process of rank 0 alone
    try:
        import lm_eval.tasks.ifeval.instructions_util  # noqa: F401
    finally:
        os.environ.pop("LOCAL_RANK")
        if before is not None:
            os.environ["LOCAL_RANK"] = before


@functools.lru_cache(maxsize=4)
def _index_tasks(folder: str | None) -> Any:
    """The harness's table of tasks: one folder's, or all of its thousands, which takes long."""
    harness = _import_harness()
    if folder is None:
        return harness.TaskManager()
    path = Path(harness.__file__).parent / "tasks" / folder
    return harness.TaskManager(include_path=str(path), include_defaults=False)


def _import_harness() -> Any:
    try:
        import lm_eval.evaluator
    except ImportError:
        raise MissingExtraError(
            "the quality gates need lm-evaluation-harness",
            fix="Run `pip install 'paceline[quality]'`.",
        ) from None
    return lm_eval.evaluator


@contextlib.contextmanager
def _closed_stderr() -> Iterator[None]:
    """Programs that the harness starts (git, to name its own version) say nothing either."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no chatter of the harness and of the data sets' library; errors are raised."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):
        import datasets

        datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()), _closed_stderr():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
