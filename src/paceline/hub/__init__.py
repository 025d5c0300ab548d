"""Drafts and targets on the Hugging Face Hub: sent to a gated repository, fetched at one commit."""

from paceline.hub.fetch import (
    DEFAULT_MAX_BYTES,
    fetch_folder,
    fetch_to_cache,
    manifest_path,
    read_manifest,
    verify_folder,
)
from paceline.hub.names import HubRef, is_hub_spec, parse_ref, parse_repo_id
from paceline.hub.submit import Submission, submit_folder

__all__ = [
    "DEFAULT_MAX_BYTES",
    "HubRef",
    "Submission",
    "fetch_folder",
    "fetch_to_cache",
    "is_hub_spec",
    "manifest_path",
    "parse_ref",
    "parse_repo_id",
    "read_manifest",
    "submit_folder",
    "verify_folder",
]
