"""The one visible table of rules: id, default severity, what it asks. Every finding names one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """severity: "error" refuses the draft, "warning" asks for a look, "note" only tells."""

    rule_id: str
    severity: str
    summary: str


def _table(*rows: tuple[str, str, str]) -> dict[str, Rule]:
    return {row[0]: Rule(rule_id=row[0], severity=row[1], summary=row[2]) for row in rows}


RULES: dict[str, Rule] = _table(
    # files
    ("fs.read", "error", "every file can be read"),
    ("fs.missing", "error", "the files that the family needs are there"),
    ("fs.allow", "error", "only the files of a draft folder, by name"),
    ("fs.code", "error", "no code, notebooks or templates"),
    ("fs.pickle", "error", "no pickles, archives or other model formats, by name or content"),
    ("fs.tokenizer", "error", "no tokenizer or generation files; the target's are used"),
    ("fs.quantjson", "error", "no second quantization file"),
    ("fs.type", "error", "regular files only: no links, devices or FIFOs"),
    ("fs.flat", "error", "no folders, hidden files, odd or colliding names"),
    ("fs.count", "error", "at most 64 files"),
    ("fs.size", "error", "file sizes within their limits"),
    ("fs.sparse", "error", "no sparse files"),
    ("lfs.pointer", "error", "weights, not Git LFS pointers"),
    # JSON
    ("json.utf8", "error", "strict UTF-8 without byte-order mark or NUL"),
    ("json.syntax", "error", "valid JSON"),
    ("json.dup", "error", "no duplicate keys at any depth"),
    ("json.const", "error", "finite numbers; integers up to 2**53"),
    ("json.depth", "error", "bounded depth, size and string length"),
    ("json.type", "error", "values have the type of their key"),
    # spec.json and metadata.json
    ("spec.missing", "error", "there is a spec.json"),
    ("spec.keys", "error", "only settings of the family in spec.json"),
    ("k.range", "error", "a sensible number of drafted tokens"),
    ("meta.keys", "note", "metadata.json has the known fields"),
    ("meta.target", "warning", "the draft was trained for this target"),
    ("meta.thinking", "warning", "the thinking mode of the training data is recorded"),
    # config.json
    ("cfg.auto_map", "error", "no key that can load code or remote files"),
    ("cfg.unknown", "error", "only keys of the family"),
    ("cfg.missing", "error", "every size is stated"),
    ("cfg.arch", "error", "one architecture of the family"),
    ("cfg.model_type", "error", "the model_type of the family"),
    ("cfg.family", "error", "declared family, rules and content agree"),
    ("cfg.spec", "error", "plain config, not the speculators format"),
    ("cfg.hidden", "error", "input width equals the target's hidden size"),
    ("cfg.vocab", "error", "vocabulary sizes fit the target"),
    ("cfg.pos", "warning", "enough positions for the context, and not a huge rotary table"),
    ("cfg.rope", "error", "a rotary setting that vLLM reads as it was trained"),
    ("cfg.heads", "error", "head counts that divide"),
    ("cfg.layers", "error", "a sensible number of layers with known types"),
    ("cfg.aux", "error", "tapped layers: unique, ascending, of the target, as many as fc reads"),
    ("cfg.residual", "note", "norm_before_residual is stated"),
    ("cfg.dtype", "error", "a 16-bit dtype, the target's own"),
    ("cfg.eps", "error", "a normal rms_norm_eps"),
    ("cfg.tie", "warning", "no embedding tie, which vLLM would ignore"),
    ("cfg.act", "error", "an activation that vLLM's layer has"),
    ("q.method", "error", "no quantized drafts yet"),
    # safetensors
    ("st.header", "error", "a sound safetensors header"),
    ("st.dup", "error", "no tensor name twice in one header"),
    ("st.fields", "error", "exactly dtype, shape and data_offsets"),
    ("st.dtype", "error", "a known dtype"),
    ("st.shape", "error", "bounded shapes that match their bytes"),
    ("st.cover", "error", "tensors cover the file without gap or overlap"),
    ("st.align", "error", "aligned tensors"),
    ("st.count", "error", "at most 20,000 tensors"),
    ("st.name", "error", "plain tensor names"),
    ("st.meta", "error", "small metadata of strings"),
    ("idx.base", "error", "the index names files of the folder"),
    ("idx.complete", "error", "index and shards agree both ways"),
    ("idx.naming", "error", "numbered shards are complete"),
    # tensors
    ("ten.missing", "error", "every tensor that vLLM needs"),
    ("ten.extra", "error", "no tensor that vLLM would ignore or refuse"),
    ("ten.shape", "error", "shapes follow from the config"),
    ("ten.dtype", "error", "dtypes that vLLM loads as meant"),
    ("ten.params", "error", "at most the allowed number of parameters"),
    ("ten.lm_head", "warning", "whose output layer is used"),
    ("ten.embed", "warning", "whose embeddings are used"),
    ("ten.d2t", "error", "d2t holds offsets to unique ids of the target"),
    ("ten.t2d", "error", "t2d and d2t name the same ids"),
    # values (--deep)
    ("ten.finite", "error", "no NaN or infinity"),
    ("ten.fp16", "warning", "values fit float16"),
    ("ten.const", "warning", "no constant matrices"),
    ("ten.norm", "warning", "weights of a usual size"),
    ("ten.copy", "warning", "no copies of target tensors"),
    ("ten.dupcontent", "warning", "no tensor twice under two names"),
    # what was not looked at
    ("mem.est", "note", "what the draft will hold in memory"),
    ("not.checked", "note", "what could not be checked, and why"),
)
