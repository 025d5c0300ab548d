"""submit against the Hub's real API: gated before it holds a file, whole, resumed, proven."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from builders import REMOVE, build_draft
from command_line import Outcome, run_command
from hub_server import Fault, HubServer

from paceline.draft import list_bundled, resolve_draft
from paceline.errors import HubError
from paceline.hub import submit_folder

pytestmark = pytest.mark.usefixtures("waits")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = build_draft(tmp_path / "mine")
    (folder / "README.md").write_text("A draft.\n")
    (folder / ".gitattributes").write_text("* -text\n")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three weight files of 200,000 bytes; their content means nothing to the Hub."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "spec.json").write_text("{}")
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.safetensors"
        (folder / name).write_bytes(bytes([number]) * 200_000)
    return folder


def held(hub: HubServer, repo_id: str) -> dict[str, bytes]:
    repo = hub.repos[repo_id]
    files = repo.commits[repo.head]
    return {name: data for name, (data, _) in files.items() if name != ".gitattributes"}


def local(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".gitattributes"}


def test_new_repository(hub: HubServer, draft: Path) -> None:
    stages: list[str] = []
    done = submit_folder(draft, "ann/new", on_stage=stages.append)
    repo = hub.repos["ann/new"]
    assert held(hub, "ann/new") == local(draft)
    assert (repo.private, repo.gated) == (True, "manual")
    assert (done.is_new, done.is_private, done.removed) == (True, True, ())
    assert str(done.ref) == f"ann/new@{repo.head}"
    assert done.files == {n: hashlib.sha256(d).hexdigest() for n, d in local(draft).items()}
    order = [hub.log.index(line) for line in hub.log if "settings" in line or "/commit/" in line]
    assert "settings" in hub.log[order[0]], "gated before the first file"
    assert hub.count(r"/resolve/") >= len(done.files), "fetched back"
    assert repo.commits[repo.head]["model.safetensors"][1], "weights are kept by LFS"
    assert b"* -text" not in repo.commits[repo.head][".gitattributes"][0]


def test_listed(hub: HubServer, draft: Path) -> None:
    done = submit_folder(draft, "ann/new", listed=True)
    repo = hub.repos["ann/new"]
    assert (repo.private, repo.gated, done.is_private) == (False, "manual", False)
    assert max(i for i, line in enumerate(hub.log) if "settings" in line) > max(
        i for i, line in enumerate(hub.log) if "/commit/" in line
    ), "visible only when all is there"


def test_hub_that_gates_public_repositories_only(hub: HubServer, draft: Path) -> None:
    """Private is enough until the page is shown; then both change at once."""
    hub.gates = "public"
    submit_folder(draft, "ann/new")
    repo = hub.repos["ann/new"]
    assert (repo.private, repo.gated) == (True, False)
    done = submit_folder(draft, "ann/new", listed=True)
    assert (repo.private, repo.gated, done.is_private) == (False, "manual", False)


def test_hub_that_does_not_gate(hub: HubServer, draft: Path) -> None:
    """Never visible without a gate: a private one stays private, a public one is not filled."""
    hub.gates = "none"
    with pytest.raises(HubError, match="private again"):
        submit_folder(draft, "ann/new", listed=True)
    assert hub.repos["ann/new"].private
    public = hub.add_repo("ann/draft", {"spec.json": b"{}"})
    with pytest.raises(HubError, match="did not gate"):
        submit_folder(draft, "ann/draft")
    assert len(public.commits) == 1


def test_model_free_draft(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "ngram"
    folder.mkdir()
    (folder / "spec.json").write_text('{"family": "ngram", "num_speculative_tokens": 3}')
    done = submit_folder(folder, "ann/ngram")
    assert list(done.files) == ["spec.json"]
    assert held(hub, "ann/ngram") == local(folder)


@pytest.mark.parametrize("gated", [False, "auto", "manual"])
def test_update_replaces_the_older_draft(gated: bool | str, hub: HubServer, draft: Path) -> None:
    old = {"config.json": b"{}", "model-00001-of-00002.safetensors": b"old"}
    repo = hub.add_repo("ann/draft", old, gated=gated)
    done = submit_folder(draft, "ann/draft")
    assert held(hub, "ann/draft") == local(draft)
    assert done.removed == ("model-00001-of-00002.safetensors",)
    assert (repo.gated, repo.private, done.is_new) == ("manual", False, False)
    assert len(repo.commits) == 2


def test_same_draft_again_is_the_same_commit(hub: HubServer, draft: Path) -> None:
    first = submit_folder(draft, "ann/new")
    assert submit_folder(draft, "ann/new").ref == first.ref


def test_a_repository_of_something_else(hub: HubServer, draft: Path) -> None:
    repo = hub.add_repo("ann/model", {"config.json": b"{}", "tokenizer.json": b"{}"})
    with pytest.raises(HubError, match=r"tokenizer\.json"):
        submit_folder(draft, "ann/model")
    assert len(repo.commits) == 1


@pytest.mark.parametrize(
    ("token", "repo_id", "words"),
    [
        (None, "ann/new", "uploading needs a token"),
        ("hf_wrong", "ann/new", "does not know this token"),
        ("hf_eve", "ann/new", "may not do that"),
        ("hf_eve", "ann/draft", "may not do that"),
        ("hf_ann", "../new", "not the name of a repository"),
        ("hf_ann", "new", "not the name of a repository"),
    ],
)
def test_no_right_to_write(
    token: str | None,
    repo_id: str,
    words: str,
    hub: HubServer,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add_repo("ann/draft", {"spec.json": b"{}"})
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=words):
        submit_folder(draft, repo_id)
    assert not hub.count("/commit/")


@pytest.mark.parametrize("name", ["train.py", "tokenizer.json", "weights.bin", "sub"])
def test_other_files_do_not_travel(name: str, hub: HubServer, draft: Path) -> None:
    (draft / name).mkdir() if name == "sub" else (draft / name).write_text("x")
    with pytest.raises(HubError, match=f"'{name}' is not a file of a draft"):
        submit_folder(draft, "ann/new")
    assert not hub.log


def test_a_link_does_not_travel(hub: HubServer, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (draft / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(HubError, match="symbolic link"):
        submit_folder(draft, "ann/new")
    assert not hub.log


def test_upload_in_parts(hub: HubServer, sharded: Path) -> None:
    """Parts as the store asks for them; a part that fails is sent again, the others are not."""
    hub.part_bytes = 64 * 1024
    hub.faults = [Fault("PUT /part/.*/2$", status=500), Fault("PUT /part/.*/3$", status=503)]
    submit_folder(sharded, "ann/new")
    assert held(hub, "ann/new") == local(sharded)
    assert hub.count("PUT /part/") == 3 * 4 + 2


def test_resumed_upload(hub: HubServer, sharded: Path) -> None:
    """One object never arrives: nothing is committed; the next call sends that object alone."""
    data = (sharded / "model-00002-of-00003.safetensors").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    hub.faults = [Fault(f"PUT /object/{sha256}", status=503, times=99)]
    with pytest.raises(HubError, match="in trouble") as caught:
        submit_folder(sharded, "ann/new")
    assert caught.value.exit_code == 6
    assert not hub.count("/commit/")
    hub.faults = []
    hub.store_log.clear()
    submit_folder(sharded, "ann/new")
    assert [line for line in hub.store_log if line.startswith("PUT")] == [f"PUT /object/{sha256}"]
    assert held(hub, "ann/new") == local(sharded)


def test_rate_limit_and_trouble_while_uploading(
    hub: HubServer, draft: Path, waits: list[float]
) -> None:
    limit = {"Retry-After": "3"}
    hub.faults = [
        Fault("repos/create", status=429, headers=limit),
        Fault("settings", status=502),
        Fault("preupload", status=429, headers=limit),
        Fault("objects/batch", status=500),
        Fault("PUT /object/", status=500),
    ]
    submit_folder(draft, "ann/new")
    assert held(hub, "ann/new") == local(draft)
    assert len(waits) == 5


def test_commit_lost_on_the_way_back(hub: HubServer, draft: Path) -> None:
    """The Hub commits, its answer is lost: the same call again finds that commit."""
    hub.faults = [Fault("/commit/", cut=0)]
    with pytest.raises(HubError, match="cannot be reached"):
        submit_folder(draft, "ann/new")
    repo = hub.repos["ann/new"]
    assert held(hub, "ann/new") == local(draft)
    assert submit_folder(draft, "ann/new").ref.commit == repo.head
    assert len(repo.commits) == 2


def test_somebody_else_commits_meanwhile(hub: HubServer, draft: Path) -> None:
    repo = hub.add_repo("ann/draft", {"spec.json": b"{}"}, gated="manual")
    with pytest.raises(HubError, match="changed meanwhile"):
        submit_folder(
            draft,
            "ann/draft",
            on_stage=lambda text: "uploading" in text and repo.add({"spec.json": b"[]"}),  # type: ignore[arg-type]
        )
    assert held(hub, "ann/draft") == {"spec.json": b"[]"}


def test_folder_changed_during_the_upload(hub: HubServer, draft: Path) -> None:
    def change(stage: str) -> None:
        if "uploading" in stage:
            (draft / "README.md").write_text("Another.\n")

    with pytest.raises(HubError, match=r"not what is in the folder: README\.md"):
        submit_folder(draft, "ann/new", on_stage=change)


def test_what_comes_back_is_wrong(hub: HubServer, draft: Path) -> None:
    hub.faults = [Fault("GET /object/", body=b"x" * 100_000, times=9)]
    with pytest.raises(HubError, match="uploaded, but could not be fetched back") as caught:
        submit_folder(draft, "ann/new")
    assert hub.repos["ann/new"].head in str(caught.value)


def command(*words: object) -> Outcome:
    return run_command(*words)


def test_command_from_draft_to_verified_folder(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submit, fetch, validate what came, verify; then by owner/name@commit alone."""
    name = list_bundled()[0]
    sent = command("submit", name, "ann/new", "--listed")
    sent.require(0)
    ref = sent.out.splitlines()[-1]
    assert ref == f"ann/new@{hub.repos['ann/new'].head}"

    hub.repos["ann/new"].readers.add("judge")
    monkeypatch.setenv("HF_TOKEN", "hf_judge")
    out = tmp_path / "entry"
    fetched = command("fetch", ref, "--out", out)
    fetched.require(0)
    assert local(out) == local(resolve_draft(name))
    command("fetch", ref, "--out", out).require(0)
    command("fetch", "--verify", out).require(0)
    command("validate", out).require(0)
    by_name = command("validate", ref, "--json")
    by_name.require(0)
    assert '"verdict"' in by_name.out
    (out / "spec.json").write_text("{}")
    changed = command("fetch", "--verify", out)
    assert (changed.code, changed.out.startswith("spec.json: sha256 is ")) == (2, True)
    for text in (sent.out, sent.err, fetched.out, fetched.err):
        assert "hf_ann" not in text
        assert "hf_judge" not in text


def test_command_refuses_what_does_not_validate(hub: HubServer, tmp_path: Path) -> None:
    bad = build_draft(tmp_path / "bad", tensors={"fc.weight": REMOVE})
    refused = command("submit", bad, "ann/new")
    assert refused.code == 2
    assert "not uploaded" in refused.out
    assert not hub.log


def test_command_says_what_is_wrong(hub: HubServer, tmp_path: Path) -> None:
    out = tmp_path / "entry"
    command("fetch", "ann/draft@main", "--out", out).require(2, "a branch or a tag")
    command("fetch", f"ann/none@{'a' * 40}", "--out", out).require(2, "no such repository")
    command("fetch", "--out", out).require(2, "what to fetch")
    command("validate", "ann/draft@main").require(2, "a branch or a tag")
    command("target", "show", "ann/draft@v1").require(2, "a branch or a tag")


def test_offline_is_said(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ref = f"ann/none@{'a' * 40}"
    command("fetch", ref, "--out", tmp_path / "entry").require(2, "HF_HUB_OFFLINE is set")
    assert not hub.log
