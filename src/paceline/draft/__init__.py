"""The draft folder: what it must hold, how it is read, how it is written."""

from paceline.draft.by_hand import infer_family
from paceline.draft.check_keys import check_config_keys, has_kind
from paceline.draft.check_tensors import check_tensors
from paceline.draft.config import build_eagle3_config
from paceline.draft.contracts import (
    SPEC_KEYS,
    Contract,
    build_contract,
    canonical_name,
    find_variant,
)
from paceline.draft.dflash import build_dflash_config, read_dflash_attention
from paceline.draft.draft_model import build_draft_model_config
from paceline.draft.eagle3 import (
    Eagle3Sizes,
    default_aux_layer_ids,
    read_aux_layer_ids,
    read_eagle3_sizes,
)
from paceline.draft.folder import FolderScan, read_bytes, scan_folder
from paceline.draft.index import INDEX_NAME
from paceline.draft.interchange import export_draft, import_draft
from paceline.draft.kernels import explain_no_cpu_kernel, find_cpu_kernel
from paceline.draft.mask_embedding import (
    MASK_EMBEDDING,
    MAX_MASK_BYTES,
    MaskEmbedding,
    parse_mask_embedding,
)
from paceline.draft.medusa import build_medusa_config
from paceline.draft.mtp import MtpSizes, build_mtp_config, read_mtp_sizes, stitch_target
from paceline.draft.native import NATIVE, read_native_draft
from paceline.draft.packed import dequantize_tensors, pack_codes, read_tensors, unpack_codes
from paceline.draft.quantized import (
    HEAD_TARGET,
    QUANTIZABLE,
    Scheme,
    count_parameters,
    read_scheme,
)
from paceline.draft.read import Draft, list_bundled, read_draft, resolve_draft
from paceline.draft.rows import TensorRule
from paceline.draft.sizes import drafts_in_parallel, read_dflash_layer_ids, read_mask_token_id
from paceline.draft.table import FAMILIES
from paceline.draft.uncovered import find_uncovered
from paceline.draft.write import write_draft

__all__ = [
    "FAMILIES",
    "HEAD_TARGET",
    "INDEX_NAME",
    "MASK_EMBEDDING",
    "MAX_MASK_BYTES",
    "NATIVE",
    "QUANTIZABLE",
    "SPEC_KEYS",
    "Contract",
    "Draft",
    "Eagle3Sizes",
    "FolderScan",
    "MaskEmbedding",
    "MtpSizes",
    "Scheme",
    "TensorRule",
    "build_contract",
    "build_dflash_config",
    "build_draft_model_config",
    "build_eagle3_config",
    "build_medusa_config",
    "build_mtp_config",
    "canonical_name",
    "check_config_keys",
    "check_tensors",
    "count_parameters",
    "default_aux_layer_ids",
    "dequantize_tensors",
    "drafts_in_parallel",
    "explain_no_cpu_kernel",
    "export_draft",
    "find_cpu_kernel",
    "find_uncovered",
    "find_variant",
    "has_kind",
    "import_draft",
    "infer_family",
    "list_bundled",
    "pack_codes",
    "parse_mask_embedding",
    "read_aux_layer_ids",
    "read_bytes",
    "read_dflash_attention",
    "read_dflash_layer_ids",
    "read_draft",
    "read_eagle3_sizes",
    "read_mask_token_id",
    "read_mtp_sizes",
    "read_native_draft",
    "read_scheme",
    "read_tensors",
    "resolve_draft",
    "scan_folder",
    "stitch_target",
    "unpack_codes",
    "write_draft",
]
