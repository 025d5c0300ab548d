"""The draft folder: what it must hold, how it is read, how it is written."""

from paceline.draft.config import build_eagle3_config
from paceline.draft.contracts import (
    SPEC_KEYS,
    Contract,
    build_contract,
    canonical_name,
    check_tensors,
)
from paceline.draft.eagle3 import (
    Eagle3Sizes,
    TensorRule,
    default_aux_layer_ids,
    read_aux_layer_ids,
    read_eagle3_sizes,
)
from paceline.draft.folder import FolderScan, read_bytes, scan_folder
from paceline.draft.index import INDEX_NAME
from paceline.draft.mtp import MtpSizes, build_mtp_config, read_mtp_sizes, stitch_target
from paceline.draft.read import Draft, list_bundled, read_draft, resolve_draft
from paceline.draft.write import write_draft

__all__ = [
    "INDEX_NAME",
    "SPEC_KEYS",
    "Contract",
    "Draft",
    "Eagle3Sizes",
    "FolderScan",
    "MtpSizes",
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
]
