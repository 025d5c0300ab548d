"""What a target is: where it comes from and the facts a draft must match."""

from paceline.target.resolve import cache_folder, resolve_target, verify_target

__all__ = ["cache_folder", "resolve_target", "verify_target"]
